#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/stop_match.h"

// What comes out when text arrives in pieces of the given lengths (0 ends; then byte by byte). *found: index or -1.
static char *run(const char *const *stops, unsigned count, const char *text, size_t piece, bool keep, int *found)
{
	size_t lens[STOP_MAX_STRINGS];
	for (unsigned i = 0; i < count; i++)
		lens[i] = strlen(stops[i]);
	struct stop_set *set = stop_set_create(stops, lens, count);
	struct stop_matcher m;
	stop_matcher_init(&m, set);
	struct json_buf out = {0};
	*found = -1;
	size_t len = strlen(text);
	for (size_t i = 0; i < len && *found < 0; i += piece)
		*found = stop_matcher_push(&m, text + i, len - i < piece ? len - i : piece, keep, &out);
	if (*found < 0)
		stop_matcher_finish(&m, &out);
	json_add(&out, "", 1);
	stop_matcher_free(&m);
	stop_set_destroy(&set);
	return out.data;
}

static const struct {
	const char *name, *stops[4], *text, *out;
	int found;
} cases[] = {
    {"none in sight", {"END"}, "hello", "hello", -1},
    {"in the middle", {"END"}, "helloENDworld", "hello", 0},
    {"at once", {"END"}, "ENDworld", "", 0},
    {"at the very end", {"END"}, "helloEND", "hello", 0},
    {"begins and does not complete", {"END"}, "helloENx", "helloENx", -1},
    {"begins at the end of the text", {"END"}, "helloEN", "helloEN", -1},
    {"overlaps itself", {"aab"}, "aaab", "a", 0},
    {"overlaps itself further", {"abab!"}, "ababab!x", "ab", 0},
    {"two, the one that ends first counts", {"cde", "cd"}, "abcde", "ab", 1},
    {"two that end together, the one that begins first counts", {"d", "cd"}, "abcd", "ab", 1},
    {"one inside the beginning of the other", {"abcX", "bc"}, "zabcY", "za", 1},
    {"characters of several bytes", {"\xe5\xa5\xbd"}, "\xe4\xbd\xa0\xe5\xa5\xbd!", "\xe4\xbd\xa0", 0},
    {"a line end", {"\n\n"}, "a\nb\n\nc", "a\nb", 0},
};

Test(stop_match, gives_the_same_text_however_it_arrives)
{
	for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
		unsigned count = 0;
		while (count < 4 && cases[c].stops[count])
			count++;
		for (size_t piece = 1; piece <= strlen(cases[c].text); piece++) {
			int found;
			char *out = run(cases[c].stops, count, cases[c].text, piece, false, &found);
			cr_expect_str_eq(out, cases[c].out, "%s, pieces of %zu: '%s', expected '%s'", cases[c].name,
					 piece, out, cases[c].out);
			cr_expect_eq(found, cases[c].found, "%s, pieces of %zu: found %d", cases[c].name, piece, found);
			free(out);
		}
	}
}

Test(stop_match, keeps_the_stop_string_if_asked_to)
{
	int found;
	char *out = run((const char *[]){"END"}, 1, "helloENDworld", 1, true, &found);
	cr_expect_str_eq(out, "helloEND");
	free(out);
}

Test(stop_match, gives_out_what_can_no_longer_become_a_stop_string)
{
	struct stop_set *set = stop_set_create((const char *[]){"abcd"}, (size_t[]){4}, 1);
	struct stop_matcher m;
	stop_matcher_init(&m, set);
	struct json_buf out = {0};
	stop_matcher_push(&m, "xabc", 4, false, &out);
	cr_expect_eq(out.len, 1, "%zu bytes came out, expected the x", out.len);
	stop_matcher_push(&m, "", 0, false, &out);
	cr_expect_eq(out.len, 1, "%zu bytes came out after an empty piece, expected the x", out.len);
	stop_matcher_push(&m, "e", 1, false, &out);
	cr_expect_eq(out.len, 5, "%zu bytes came out, expected xabce", out.len);
	json_buf_free(&out);
	stop_matcher_free(&m);
	stop_set_destroy(&set);
}

// Against a search in the whole text, over short texts of two letters, which overlap in every way.
Test(stop_match, equals_a_search_in_the_whole_text)
{
	unsigned rng = 12345, checked = 0;
	for (int round = 0; round < 3000; round++) {
		char text[17], stop[5];
		rng = rng * 1664525 + 1013904223;
		size_t n = 1 + (rng >> 20) % 16, k = 1 + (rng >> 28) % 4;
		for (size_t i = 0; i < n; i++)
			text[i] = 'a' + ((rng = rng * 1664525 + 1013904223) >> 30 & 1);
		text[n] = 0;
		for (size_t i = 0; i < k; i++)
			stop[i] = 'a' + ((rng = rng * 1664525 + 1013904223) >> 30 & 1);
		stop[k] = 0;
		const char *at = strstr(text, stop);
		int found;
		char *out = run((const char *[]){stop}, 1, text, 1 + (rng >> 25) % 5, false, &found);
		size_t expected = at ? (size_t)(at - text) : n;
		cr_assert_eq(strlen(out), expected, "'%s' in '%s' gave '%s'", stop, text, out);
		cr_assert_eq(found, at ? 0 : -1);
		free(out);
		checked++;
	}
	cr_expect_eq(checked, 3000);
}
