#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/json_write.h"

static void expect(struct json_buf *b, const char *wanted)
{
	json_add(b, "", 1);
	cr_expect_str_eq(b->data, wanted, "got %s, expected %s", b->data, wanted);
	b->len = 0;
}

Test(json_write, escapes_what_json_demands_and_keeps_the_rest)
{
	struct json_buf b = {0};
	json_add_string(&b, "a\"b\\c\n\t\r\b\f\x01\x1f\x7f\0z", 15);
	expect(&b, "\"a\\\"b\\\\c\\n\\t\\r\\b\\f\\u0001\\u001f\x7f\\u0000z\"");
	json_add_string(&b, "\xc3\xa9\xe4\xbd\xa0\xf0\x9f\x98\x80", 9);
	expect(&b, "\"\xc3\xa9\xe4\xbd\xa0\xf0\x9f\x98\x80\"");
	json_buf_free(&b);
}

Test(json_write, turns_each_maximal_invalid_part_into_one_replacement_character)
{
	struct json_buf b = {0};
	json_add_string(&b,
			"a\x80"
			"b\xe4\xbd"
			"c\xf0\x9f\x98",
			9);
	expect(&b, "\"a\xef\xbf\xbd"
		   "b\xef\xbf\xbd"
		   "c\xef\xbf\xbd\"");
	json_add_string(&b, "\xed\xa0\x80", 3); // a surrogate
	expect(&b, "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
	json_add_string(&b, "\xc0\xaf", 2); // overlong
	expect(&b, "\"\xef\xbf\xbd\xef\xbf\xbd\"");
	json_buf_free(&b);
}

Test(json_write, prints_floats_that_read_back_as_the_same_float)
{
	const float values[] = {-0.1f, -1.17549435e-38f, -16.3456789f, 1.0f / 3, -3.40282347e38f, 0};
	for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
		struct json_buf b = {0};
		json_add_float(&b, values[i]);
		json_add(&b, "", 1);
		cr_expect_eq(strtof(b.data, NULL), values[i], "%s", b.data);
		json_buf_free(&b);
	}
	struct json_buf b = {0};
	json_add_float(&b, -INFINITY);
	expect(&b, "-9999.0");
	json_add_float(&b, NAN);
	expect(&b, "null");
	json_buf_free(&b);
}

Test(json_write, grows_for_texts_of_any_length)
{
	static char text[1000];
	memset(text, 'x', sizeof text - 1);
	struct json_buf b = {0};
	for (unsigned i = 0; i < 3000; i++)
		json_addf(&b, "%s", text);
	cr_expect_eq(b.len, 3000 * 999);
	json_add_u64(&b, UINT64_MAX);
	cr_expect_eq(memcmp(b.data + b.len - 20, "18446744073709551615", 20), 0);
	json_add_u64(&b, 0);
	cr_expect_eq(b.data[b.len - 1], '0');
	json_buf_free(&b);
}
