// The options table: ranges, precedence, and that every row is reachable in each of its four forms.
#include "common/options.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static enum status parse(struct options *o, struct error *e, int argc, const char *const *argv)
{
	e->text[0] = 0;
	return options_parse(o, argc, (char **)argv, e);
}
#define PARSE(...)                                                                                                     \
	parse(&o, &e, (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)), (const char *const[]){__VA_ARGS__})

static struct options o;
static struct error e;

Test(options, defaults_are_those_of_the_table)
{
	cr_assert_eq(PARSE("serve", "m.gguf"), STATUS_OK, "%s", e.text);
	cr_assert_str_eq(o.model, "m.gguf");
	cr_assert(o.devices_auto);
	cr_assert_str_eq(o.host, "127.0.0.1");
	cr_assert_eq(o.port, 8080u);
	cr_assert_eq(o.plan_sequences, 64u);
	cr_assert_eq(o.plan_tokens, 2048u);
	cr_assert_eq(o.max_seqs, 256u);
	cr_assert_eq(o.block_size, 16u);
	cr_assert(o.prefix_cache);
	cr_assert_eq(o.launcher_fd, -1);
	cr_assert_eq(o.max_context, 0u);
}

Test(options, devices_keep_their_order_and_threads)
{
	cr_assert_eq(PARSE("serve", "m", "--devices", "cpu/1,cpu/8,cpu", "--memory=20GiB,0.8,512MiB"), STATUS_OK, "%s", e.text);
	cr_assert_eq(o.n_devices, 3);
	cr_assert_eq(o.devices[0].kind, OPTION_DEVICE_CPU);
	cr_assert_eq(o.devices[0].threads, 1);
	cr_assert_eq(o.devices[1].threads, 8);
	cr_assert_eq(o.devices[2].threads, 0);
	cr_assert_eq(o.memory[0].bytes, 20ull << 30);
	cr_assert(o.memory[1].is_fraction);
	cr_assert_eq(o.memory[2].bytes, 512ull << 20);
}

#ifndef STAGECOACH_HAVE_CUDA
Test(options, what_needs_a_gpu_says_so_in_a_build_without_gpu_workers)
{
	cr_assert_eq(PARSE("serve", "m", "--devices", "cpu,cuda:1"), STATUS_UNAVAILABLE);
	cr_assert(strstr(e.text, "cuda:1"), "%s", e.text);
	cr_assert_eq(PARSE("serve", "m", "--batch-invariant"), STATUS_UNAVAILABLE);
}
#endif

Test(options, what_is_wrong_is_refused_with_the_options_name)
{
	static const struct { const char *name, *value; } bad[] = {
		{"--port", "65536"}, {"--port", "-1"}, {"--port", "80x"}, {"--port", ""}, {"--port", "8e1"},
		{"--max-seqs", "0"}, {"--max-context", "0"}, {"--block-size", "257"}, {"--devices", "gpu"}, {"--devices", "cpu/0"},
		{"--devices", "cpu,"}, {"--layers", "1,x"}, {"--memory", "0"}, {"--memory", "-1GiB"}, {"--memory", "nan"}, {"--memory", "1.5"},
		{"--cors-origin", "example.org"},
		{"--cors-origin", "https://a.example https://b.example"}, {"--cors-origin", "https://a.example\nX-Other: 1"},
		{"--data-address", "127.0.0.1:x"}, {"--data-address", "127.0.0.1:9-"}, {"--data-address", "127.0.0.1:9-8"},
		{"--plan-for", "64"}, {"--plan-for", "0,5"}, {"--prefix-cache", "maybe"}, {"--dtype", "int8"}, {"--kv-dtype", "float"},
		{"--load", "random"}, {"--log-level", "loud"}, {"--slow-client-timeout", "0"},
	};
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
		cr_assert_eq(PARSE("serve", "m", bad[i].name, bad[i].value), STATUS_USAGE, "%s %s was accepted", bad[i].name, bad[i].value);
		cr_assert(strstr(e.text, bad[i].name), "'%s' does not name %s", e.text, bad[i].name);
	}
}

Test(options, unknown_options_verbs_and_extra_arguments_are_refused)
{
	cr_assert_eq(PARSE("serve", "m", "--no-such"), STATUS_USAGE);
	cr_assert(strstr(e.text, "--no-such"));
	cr_assert_eq(PARSE("fly"), STATUS_USAGE);
	cr_assert_eq(PARSE("serve"), STATUS_USAGE);
	cr_assert_eq(PARSE("serve", "a", "b"), STATUS_USAGE);
	cr_assert_eq(PARSE("stop", "--devices", "cpu"), STATUS_USAGE);
	cr_assert_eq(PARSE("serve", "m", "--port"), STATUS_USAGE);
}

Test(options, data_of_other_hosts_is_taken_on_loopback_only)
{
	cr_assert_eq(PARSE("worker", "--join", "127.0.0.1:9000", "--data-address", "127.0.0.1"), STATUS_OK, "%s", e.text);
	cr_assert_eq(PARSE("worker", "--join", "127.0.0.1:9000", "--data-address", "127.0.0.1:9100-9110"), STATUS_OK, "%s", e.text);
	cr_assert_eq(PARSE("worker", "--join", "127.0.0.1:9000", "--data-address", "10.0.0.1:9100"), STATUS_UNAVAILABLE);
	cr_assert(strstr(e.text, "10.0.0.1:9100") && strstr(e.text, "loopback"), "%s", e.text);
	cr_assert_eq(PARSE("worker", "--join", "somewhere"), STATUS_USAGE);
	cr_assert(strstr(e.text, "HOST:PORT"), "%s", e.text);
}

Test(options, a_key_file_without_an_address_to_listen_on_is_refused)
{
	cr_assert_eq(PARSE("serve", "m", "--key-file", "k"), STATUS_USAGE);
	cr_assert(strstr(e.text, "--listen"), "%s", e.text);
	cr_assert_eq(PARSE("serve", "m", "--key-file", "k", "--listen", "10.0.0.1:9000"), STATUS_OK, "%s", e.text);
}

Test(options, serving_beyond_loopback_needs_keys_or_consent)
{
	cr_assert_eq(PARSE("serve", "m", "--host", "0.0.0.0"), STATUS_USAGE);
	cr_assert_eq(PARSE("serve", "m", "--host", "0.0.0.0", "--no-auth"), STATUS_OK, "%s", e.text);
	cr_assert_eq(PARSE("serve", "m", "--host", "0.0.0.0", "--api-key-file", "k"), STATUS_OK, "%s", e.text);
}

Test(options, command_line_beats_environment_beats_file)
{
	char path[] = "/tmp/stagecoach-options-XXXXXX";
	int fd = mkstemp(path);
	const char text[] = "# comment\nport = 1111\nmax-seqs = 3\nblock-size=32\n\n";
	cr_assert_eq(write(fd, text, sizeof text - 1), (ssize_t)sizeof text - 1);
	close(fd);
	setenv("STAGECOACH_PORT", "2222", 1);
	setenv("STAGECOACH_MAX_SEQS", "4", 1);
	enum status s = PARSE("serve", "m", "--port", "3333", "--config", path);
	unlink(path);
	cr_assert_eq(s, STATUS_OK, "%s", e.text);
	cr_assert_eq(o.port, 3333u);
	cr_assert_eq(o.max_seqs, 4u);
	cr_assert_eq(o.block_size, 32u);
}

Test(options, a_wrong_line_of_the_file_is_named_by_number)
{
	char path[] = "/tmp/stagecoach-options-XXXXXX";
	int fd = mkstemp(path);
	const char text[] = "port = 1\nnonsense = 5\n";
	cr_assert_eq(write(fd, text, sizeof text - 1), (ssize_t)sizeof text - 1);
	close(fd);
	enum status s = PARSE("serve", "m", "--config", path);
	unlink(path);
	cr_assert_eq(s, STATUS_USAGE);
	cr_assert(strstr(e.text, "line 2") && strstr(e.text, "nonsense"), "%s", e.text);
}

Test(options, the_sample_config_is_accepted_as_it_stands_and_uncommented)
{
	char path[] = "/tmp/stagecoach-options-XXXXXX", bare_path[] = "/tmp/stagecoach-options-XXXXXX";
	FILE *f = fdopen(mkstemp(path), "w+"), *bare = fdopen(mkstemp(bare_path), "w");
	options_print_sample_config(f);
	rewind(f);
	char line[1024];
	int named = 0;
	bool is_help = true; // of each pair of comment lines the second is the option
	while (fgets(line, sizeof line, f)) {
		if (strncmp(line, "# ", 2)) {
			is_help = true;
			continue;
		}
		if (!is_help) {
			fputs(line + 2, bare);
			named++;
		}
		is_help = false;
	}
	fclose(f);
	fclose(bare);
	enum status s = PARSE("serve", "m", "--config", path);
	cr_expect_eq(s, STATUS_OK, "%s", e.text);
	cr_expect(o.devices_auto);
	s = PARSE("serve", "m", "--config", bare_path);
	unlink(path);
	unlink(bare_path);
	cr_expect_eq(s, STATUS_OK, "%s", e.text);
	cr_expect_eq(o.n_devices, 2, "the uncommented lines were not read");
	cr_expect_gt(named, 30);
}
