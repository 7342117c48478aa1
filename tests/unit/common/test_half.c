// float16 conversions: exact both ways, rounding to nearest even.
#include "common/half.h"

#include <criterion/criterion.h>
#include <math.h>

Test(half, every_half_survives_the_way_to_float_and_back)
{
	for (unsigned i = 0; i < 65536; i++) {
		float f = half_to_float((uint16_t)i);
		if (isnan(f))
			cr_assert_eq(i & 0x7c00, 0x7c00u);
		else
			cr_assert_eq(half_from_float(f), i, "0x%04x became %a became 0x%04x", i, (double)f, half_from_float(f));
	}
}

Test(half, values_between_two_halves_go_to_the_nearer_and_ties_to_the_even_one)
{
	for (unsigned i = 0; i < 0x7bff; i++) {
		float low = half_to_float((uint16_t)i), high = half_to_float((uint16_t)(i + 1));
		float middle = (low + high) / 2;
		cr_assert_eq(half_from_float(middle), i & 1 ? i + 1 : i, "tie above 0x%04x", i);
		cr_assert_eq(half_from_float(nextafterf(middle, 0)), i, "below the tie above 0x%04x", i);
		cr_assert_eq(half_from_float(nextafterf(middle, INFINITY)), i + 1, "above the tie above 0x%04x", i);
		cr_assert_eq(half_from_float(-middle), 0x8000 | (i & 1 ? i + 1 : i));
	}
	cr_assert_eq(half_from_float(65519.99f), 0x7bff);
	cr_assert_eq(half_from_float(65520.0f), 0x7c00);
	cr_assert(isnan(half_to_float(half_from_float(NAN))));
}
