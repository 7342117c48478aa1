// Pieces of mappings: where they lie, and when they go.
#include <criterion/criterion.h>
#include <stdint.h>

#include "kernels/cpu/pages.h"

Test(pages, pieces_are_aligned_zero_and_apart, .timeout = 20)
{
	static const size_t sizes[] = {1, 64, 100, 5 << 20, 1000, 40 << 20, 70 << 20, 3};
	enum { COUNT = sizeof(sizes) / sizeof(*sizes) };
	struct cpu_pages *open = NULL, *owner[COUNT];
	unsigned char *piece[COUNT];
	for (int i = 0; i < COUNT; i++) {
		piece[i] = cpu_pages_take(&open, &owner[i], sizes[i]);
		cr_assert_not_null(piece[i]);
		cr_assert_eq((uintptr_t)piece[i] % 64, 0, "piece %d", i);
		for (size_t b = 0; b < sizes[i]; b += sizes[i] < 4096 ? 1 : 4096)
			cr_assert_eq(piece[i][b], 0, "piece %d, byte %zu", i, b);
		piece[i][0] = piece[i][sizes[i] - 1] = (unsigned char)(i + 1);
	}
	for (int i = 0; i < COUNT; i++) {
		cr_assert_eq(piece[i][0], i + 1);
		cr_assert_eq(piece[i][sizes[i] - 1], i + 1);
		cpu_pages_give(&open, owner[i]);
	}
	cr_assert_null(open);
}

Test(pages, what_cannot_be_had_is_null_and_leaves_the_open_mapping, .timeout = 20)
{
	struct cpu_pages *open = NULL, *owner, *none;
	char *piece = cpu_pages_take(&open, &owner, 10);
	cr_assert_not_null(piece);
	cr_assert_null(cpu_pages_take(&open, &none, SIZE_MAX));
	piece[9] = 1;
	cpu_pages_give(&open, owner);
	cr_assert_null(open);
}
