#define _GNU_SOURCE
// What the replayed reference does not show: refusals, control tokens in parts of a text, long words, incremental
// decoding, models with and without a vocabulary.
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "coordinator/tokenizer_internal.h"

#define GOLDEN TEST_DATA_DIR "/golden/tokenizer/"

static uint8_t *read_file(const char *path, size_t *len)
{
	FILE *f = fopen(path, "rb");
	cr_assert_not_null(f, "cannot open %s", path);
	fseek(f, 0, SEEK_END);
	*len = (size_t)ftell(f);
	rewind(f);
	uint8_t *data = malloc(*len + 1);
	cr_assert_eq(fread(data, 1, *len, f), *len);
	fclose(f);
	return data;
}

// The tokenizer of a GGUF file in which `from` is first replaced by `to`, which is as long.
static enum status from_gguf(struct tokenizer **t, const char *path, const char *from, const char *to, struct error *e)
{
	size_t len;
	uint8_t *data = read_file(path, &len);
	if (from) {
		uint8_t *at = memmem(data, len, from, strlen(from));
		cr_assert_not_null(at);
		memcpy(at, to, strlen(to));
	}
	struct gguf *g;
	cr_assert_eq(gguf_parse(&g, data, len, path, e), STATUS_OK, "%s", e->text);
	enum status status = tokenizer_from_gguf(t, g, e);
	gguf_destroy(&g);
	free(data);
	return status;
}

static struct tokenizer *demo(void)
{
	struct tokenizer *t;
	struct error e = {""};
	cr_assert_eq(from_gguf(&t, GOLDEN "demo_vocabulary.gguf", NULL, NULL, &e), STATUS_OK, "%s", e.text);
	return t;
}

static void encode(const struct tokenizer *t, const char *text, size_t len, bool add, bool parse, struct token_list *ids)
{
	struct error e = {""};
	struct encode_options options = {.add_special = add, .parse_special = parse};
	ids->count = 0;
	cr_assert_eq(tokenizer_encode(t, text, len, &options, ids, &e), STATUS_OK, "%s", e.text);
}

Test(tokenizer_cases, refuses_an_unknown_pre_tokenizer_or_model_by_name)
{
	struct tokenizer *t;
	struct error e = {""};
	cr_expect_eq(from_gguf(&t, GOLDEN "tiny_gpt-2.gguf", "gpt-2", "gpt-x", &e), STATUS_REFUSED);
	cr_expect(strstr(e.text, "'gpt-x'"), "%s", e.text);
	cr_expect_eq(from_gguf(&t, GOLDEN "tiny_gpt-2.gguf", "gpt2", "bert", &e), STATUS_REFUSED);
	cr_expect(strstr(e.text, "'bert'"), "%s", e.text);
	cr_expect_null(t);
}

#define HEAD "{\"added_tokens\":[],\"decoder\":{\"type\":\"ByteLevel\"},"
#define PRE "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},"
#define MODEL "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}}"
#define SPLIT(pattern) HEAD "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{" \
	"\"Regex\":\"" pattern "\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\"}]}," MODEL

Test(tokenizer_cases, refuses_by_name_what_a_tokenizer_json_has_that_is_not_supported)
{
	static const struct { const char *json, *part; } cases[] = {
		{"{", "not JSON"},
		{"[]", "no model"},
		{HEAD PRE "\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", "Unigram"},
		{HEAD PRE "\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", "WordPiece"},
		{HEAD PRE "\"model\":{\"type\":\"BPE\",\"dropout\":0.1,\"vocab\":{},\"merges\":[]}}", "dropout"},
		{HEAD PRE "\"model\":{\"type\":\"BPE\",\"end_of_word_suffix\":\"</w>\",\"vocab\":{},\"merges\":[]}}", "end_of_word_suffix"},
		{HEAD PRE "\"model\":{\"type\":\"BPE\",\"unk_token\":\"?\",\"vocab\":{\"a\":0},\"merges\":[]}}", "unk_token"},
		{HEAD PRE "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[\"a b\"]}}", "the result"},
		{HEAD PRE "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a c\"]}}", "the second"},
		{HEAD PRE "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a\"]}}", "two tokens"},
		{HEAD PRE "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", "id 0"},
		{HEAD PRE "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":99999999999},\"merges\":[]}}", "no proper id"},
		{HEAD PRE "\"normalizer\":{\"type\":\"NFKC\"}," MODEL, "NFKC"},
		{HEAD PRE "\"normalizer\":{\"type\":\"Lowercase\"}," MODEL, "Lowercase"},
		{HEAD PRE "\"post_processor\":{\"type\":\"RobertaProcessing\"}," MODEL, "RobertaProcessing"},
		{HEAD "\"pre_tokenizer\":{\"type\":\"Metaspace\"}," MODEL, "Metaspace"},
		{HEAD "\"pre_tokenizer\":null," MODEL, "ByteLevel"},
		{"{\"added_tokens\":[],\"decoder\":{\"type\":\"WordPiece\"}," PRE MODEL, "WordPiece"},
		{"{\"added_tokens\":[{\"id\":0,\"content\":\"x\",\"special\":true}],\"decoder\":{\"type\":\"ByteLevel\"}," PRE MODEL, "'x'"},
		{SPLIT("a(?<n>b)"), "kind of group"},
		{SPLIT("\\\\bx"), "escape"},
		{SPLIT("^x"), "not supported here"},
		{SPLIT("[a&&b]"), "class within a class"},
		{SPLIT("[a"), "[ without ]"},
		{SPLIT("(a"), "( without )"},
		{SPLIT("a)"), ") without ("},
		{SPLIT("\\\\p{Foo}"), "unknown property"},
		{SPLIT("(a*)*"), "match nothing"},
		{SPLIT("((a{999}){999}){999}"), "too large"},
		{SPLIT("(?i:ss)"), "pair of letters"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct tokenizer *t;
		struct error e = {""};
		cr_expect_eq(tokenizer_from_json(&t, cases[i].json, strlen(cases[i].json), &e), STATUS_REFUSED, "%s", cases[i].json);
		cr_expect(strstr(e.text, cases[i].part), "'%s' lacks '%s'", e.text, cases[i].part);
		cr_expect_null(t);
	}
}

Test(tokenizer_cases, gives_up_on_a_pattern_that_takes_exponential_time, .timeout = 60)
{
	struct tokenizer *t;
	struct error e = {""};
	const char *json = SPLIT("(?:(?:a|aa)+)+b");
	char text[200];
	struct token_list ids = {0};
	struct encode_options options = {0};
	memset(text, 'a', sizeof text);
	cr_assert_eq(tokenizer_from_json(&t, json, strlen(json), &e), STATUS_OK, "%s", e.text);
	cr_expect_eq(tokenizer_encode(t, text, sizeof text, &options, &ids, &e), STATUS_INVALID);
	cr_expect(strstr(e.text, "too long"), "%s", e.text);
	free(ids.ids);
	tokenizer_destroy(&t);
}

Test(tokenizer_cases, parses_control_tokens_in_the_parts_that_are_not_from_a_client)
{
	struct tokenizer *t = demo();
	static const struct { struct text_segment parts[3]; int controls; } cases[] = {
		{{{"<|im_start|>", 12, false}, {"<|im_start|>", 12, true}, {"<|im_end|>", 10, false}}, 2},
		{{{"<|im_", 5, false}, {"start", 5, true}, {"|>", 2, false}}, 0},
		{{{"<|im_start|", 11, true}, {">", 1, true}, {"<|im_end|>", 10, false}}, 1},
		{{{"<|im_", 5, false}, {"end", 3, false}, {"|>", 2, false}}, 1},
		{{{"a", 1, true}, {"", 0, true}, {"<|im_end|>", 10, false}}, 1},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct token_list ids = {0};
		struct error e = {""};
		int controls = 0;
		cr_assert_eq(tokenizer_encode_segments(t, cases[i].parts, 3, false, &ids, &e), STATUS_OK);
		for (size_t k = 0; k < ids.count; k++)
			controls += tokenizer_is_control(t, ids.ids[k]);
		cr_expect_eq(controls, cases[i].controls, "case %zu: %d", i, controls);
		free(ids.ids);
	}
	tokenizer_destroy(&t);
}

// A hundred thousand times `unit`, there and back.
static void round_trip(const struct tokenizer *t, const char *name, const char *unit)
{
	size_t n = strlen(unit), len = 100000 * n, back_len = 0, capacity = 0;
	char *text = malloc(len), *back = NULL;
	struct token_list ids = {0};
	struct detokenizer d;
	for (size_t k = 0; k < len; k += n)
		memcpy(text + k, unit, n);
	encode(t, text, len, false, true, &ids);
	detokenizer_init(&d, t, false);
	for (size_t k = 0; k < ids.count; k++)
		detokenizer_push(&d, ids.ids[k], &back, &back_len, &capacity);
	detokenizer_finish(&d, &back, &back_len, &capacity);
	if (unit[0] == '\xff')
		cr_expect_eq(back_len, 3 * len);
	else
		cr_expect(back_len == len && !memcmp(back, text, len), "%s: %s", name, unit);
	free(text);
	free(back);
	free(ids.ids);
}

// Quadratic time would take minutes here.
Test(tokenizer_cases, encodes_long_words_and_long_spaces_under_every_pattern, .timeout = 100)
{
	static const char *const units[] = {"a", "A", " ", "\n", " \n", "\t ", "ab", "\xe4\xbd\xa0", "\xf0\x9f\x98\x80", "\xff", "7", "'",
	                                    "'s", "!", "aA", "! ", "/"};
	static const char *const files[] = {"demo_vocabulary", "tiny_llama-bpe", "tiny_qwen2", "tiny_gpt-4o", "tiny_tekken",
	                                    "tiny_default"};
	for (size_t k = 0; k < sizeof files / sizeof *files; k++) {
		char path[1024];
		struct tokenizer *t;
		struct error e = {""};
		snprintf(path, sizeof path, "%s%s.gguf", GOLDEN, files[k]);
		cr_assert_eq(from_gguf(&t, path, NULL, NULL, &e), STATUS_OK, "%s", e.text);
		for (size_t i = 0; i < sizeof units / sizeof *units; i++)
			round_trip(t, files[k], units[i]);
		tokenizer_destroy(&t);
	}
}

// A pattern that fails at the end of each run of spaces, and marks that have to be sorted.
Test(tokenizer_cases, takes_no_quadratic_time_over_spaces_or_marks, .timeout = 100)
{
	struct tokenizer *t;
	struct error e = {""};
	struct token_list ids = {0};
	const char *json = "{\"added_tokens\":[],\"normalizer\":{\"type\":\"NFC\"},\"decoder\":{\"type\":\"ByteLevel\"},"
		"\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"
		"\"\\\\s+$\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\",\"add_prefix_space\":false}]}," MODEL;
	size_t len = 400000;
	char *text = malloc(len + 1);
	cr_assert_eq(tokenizer_from_json(&t, json, strlen(json), &e), STATUS_OK, "%s", e.text);
	memset(text, ' ', len);
	text[len] = 'a';
	encode(t, text, len + 1, false, false, &ids);
	cr_expect_eq(ids.count, 1);
	for (size_t i = 0; i < len; i += 4)
		memcpy(text + i, "\xcc\x81\xcc\xa3", 4); // class 230, then 220
	encode(t, text, len + 1, false, false, &ids);
	cr_expect_eq(ids.count, 1);
	free(text);
	free(ids.ids);
	tokenizer_destroy(&t);
}

Test(tokenizer_cases, adds_its_first_token_exactly_once)
{
	struct tokenizer *t;
	struct error e = {""};
	struct token_list ids = {0};
	const char *json = "{\"added_tokens\":[{\"id\":3,\"content\":\"<s>\",\"special\":true}],\"decoder\":{\"type\":\"ByteLevel\"}," PRE
		"\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}],"
		"\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":[3]}}}," MODEL;
	cr_assert_eq(tokenizer_from_json(&t, json, strlen(json), &e), STATUS_OK, "%s", e.text);
	static const struct { const char *text; bool add, parse; size_t count; } cases[] = {
		{"ab", true, true, 2}, {"<s>ab", true, true, 2}, {"ab", false, true, 1}, {"", true, true, 1}, {"<s><s>", true, true, 2},
		{"<s>ab", true, false, 2}, // as text its characters have no tokens here
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		encode(t, cases[i].text, strlen(cases[i].text), cases[i].add, cases[i].parse, &ids);
		cr_expect_eq(ids.count, cases[i].count, "'%s': %zu", cases[i].text, ids.count);
	}
	free(ids.ids);
	tokenizer_destroy(&t);
}

Test(tokenizer_cases, decodes_only_whole_characters_and_replaces_what_cannot_become_one)
{
	struct tokenizer *t = demo();
	static const struct { const char *bytes; size_t n; const char *want; } cases[] = {
		{"\xf0\x9f\x98\x80", 4, "\xf0\x9f\x98\x80"},
		{"\xf0\x9f\x98", 3, "\xef\xbf\xbd"},
		{"\xe4\xbd" "A", 3, "\xef\xbf\xbd" "A"},
		{"\xe4\xe4\xbd\xa0", 4, "\xef\xbf\xbd\xe4\xbd\xa0"},
		{"\x80\x80", 2, "\xef\xbf\xbd\xef\xbf\xbd"},
		{"\xed\xa0\x80", 3, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct detokenizer d;
		char *text = NULL;
		size_t len = 0, capacity = 0;
		detokenizer_init(&d, t, false);
		for (size_t k = 0; k < cases[i].n; k++) {
			uint32_t id = t->byte_ids[(uint8_t)cases[i].bytes[k]];
			size_t before = len;
			if (id == NO_TOKEN)
				continue;
			detokenizer_push(&d, id, &text, &len, &capacity);
			cr_expect(len == before || (text[before] & 0xC0) != 0x80, "a character was cut");
		}
		detokenizer_finish(&d, &text, &len, &capacity);
		cr_expect(len == strlen(cases[i].want) && !memcmp(text, cases[i].want, len), "case %zu: '%.*s'", i, (int)len, text);
		free(text);
	}
	tokenizer_destroy(&t);
}

Test(tokenizer_cases, finds_tokens_and_hides_control_tokens)
{
	struct tokenizer *t = demo();
	uint32_t id = 0;
	size_t len;
	cr_assert(tokenizer_find(t, "<|im_end|>", &id));
	cr_expect_eq(id, 2);
	cr_expect(tokenizer_is_control(t, id));
	tokenizer_token_bytes(t, id, true, &len);
	cr_expect_eq(len, 0);
	cr_expect(!strncmp(tokenizer_token_bytes(t, id, false, &len), "<|im_end|>", 10) && len == 10);
	cr_expect(tokenizer_find(t, "\xc4\xa0the", &id) && !tokenizer_is_control(t, id));
	cr_expect(!strncmp(tokenizer_token_bytes(t, id, true, &len), " the", 4) && len == 4);
	cr_expect_not(tokenizer_find(t, "no such token", &id));
	tokenizer_token_bytes(t, tokenizer_vocab_size(t), false, &len);
	cr_expect_eq(len, 0);
	cr_expect_str_eq(tokenizer_special_text(t, TOKENIZER_BOS), "<|im_start|>");
	cr_expect_str_eq(tokenizer_special_text(t, TOKENIZER_UNK), "<|endoftext|>");
	cr_expect_eq(tokenizer_generation(t)->bos, 1);
	cr_expect_eq(tokenizer_generation(t)->n_eos, 1);
	cr_expect_eq(tokenizer_generation(t)->eos[0], 2);
	tokenizer_destroy(&t);
}

static struct tokenizer *of_model(const char *path, bool dummy, struct model **m)
{
	struct tokenizer *t = NULL;
	struct error e = {""};
	cr_assert_eq(model_open(m, path, &(struct model_open_options){.load_dummy = dummy}, &e), STATUS_OK, "%s", e.text);
	cr_assert_eq(tokenizer_create(&t, *m, &e), STATUS_OK, "%s", e.text);
	return t;
}

Test(tokenizer_cases, is_the_same_from_both_forms_of_a_model)
{
	struct model *a, *b;
	struct tokenizer *g = of_model(TEST_DATA_DIR "/golden/tiny/llama.gguf", false, &a);
	struct tokenizer *f = of_model(TEST_DATA_DIR "/golden/tiny/llama", false, &b);
	struct token_list x = {0}, y = {0};
	const char *text = "the other one, in an 1234 \xe4\xbd\xa0\xff there";
	encode(g, text, strlen(text), true, true, &x);
	encode(f, text, strlen(text), true, true, &y);
	cr_expect_eq(tokenizer_vocab_size(g), tokenizer_vocab_size(f));
	for (int i = TOKENIZER_BOS; i <= TOKENIZER_EOS; i++)
		cr_expect_str_eq(tokenizer_special_text(g, i), tokenizer_special_text(f, i));
	cr_expect(x.count > 10 && x.count == y.count && !memcmp(x.ids, y.ids, x.count * sizeof *x.ids));
	for (int i = 0; i < tokenizer_generation(g)->n_eos; i++) {
		bool found = false;
		for (int k = 0; k < tokenizer_generation(f)->n_eos; k++)
			found |= tokenizer_generation(f)->eos[k] == tokenizer_generation(g)->eos[i];
		cr_expect(found);
	}
	free(x.ids);
	free(y.ids);
	tokenizer_destroy(&g);
	tokenizer_destroy(&f);
	model_close(&a);
	model_close(&b);
}

Test(tokenizer_cases, shows_ids_where_a_model_has_no_vocabulary)
{
	char folder[] = "/tmp/stagecoach-test-XXXXXX", path[64];
	size_t len;
	cr_assert_not_null(mkdtemp(folder));
	uint8_t *config = read_file(TEST_DATA_DIR "/golden/tiny/llama/config.json", &len);
	snprintf(path, sizeof path, "%s/config.json", folder);
	FILE *f = fopen(path, "wb");
	cr_assert_eq(fwrite(config, 1, len, f), len);
	fclose(f);
	struct model *m;
	struct error e = {""};
	struct token_list ids = {0};
	struct encode_options options = {0};
	struct tokenizer *t = of_model(folder, true, &m);
	unlink(path);
	rmdir(folder);
	cr_expect(!strncmp(tokenizer_token_bytes(t, 17, true, &len), "<17>", 4) && len == 4);
	cr_expect_eq(tokenizer_encode(t, "x", 1, &options, &ids, &e), STATUS_INVALID);
	cr_expect(strstr(e.text, "no vocabulary"), "%s", e.text);
	tokenizer_destroy(&t);
	model_close(&m);
	free(config);
}
