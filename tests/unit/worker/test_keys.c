// Key files of workers that join over TCP.
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "temp_folder.h"
#include "worker/keys.h"

static const char *const whole =
	"# made by a test\n"
	"server-public 0123456789012345678901234567890123456789\n"
	"client-public abcdefghijabcdefghijabcdefghijabcdefghij\n"
	"client-secret ABCDEFGHIJABCDEFGHIJABCDEFGHIJABCDEFGHIJ\n";

static enum status read_text(const char *text, mode_t mode, struct worker_keys *k, struct error *e)
{
	struct temp_folder t;
	temp_folder_create(&t);
	const char *path = temp_folder_path(&t, "keys");
	FILE *f = fopen(path, "w");
	fputs(text, f);
	fclose(f);
	chmod(path, mode);
	enum status status = worker_keys_read(k, path, e);
	temp_folder_remove(&t);
	return status;
}

Test(keys, a_whole_file_is_read)
{
	struct worker_keys k;
	struct error e = {""};
	cr_assert_eq(read_text(whole, 0600, &k, &e), STATUS_OK, "%s", e.text);
	cr_expect_str_eq(k.server_public, "0123456789012345678901234567890123456789");
	cr_expect_str_eq(k.client_secret, "ABCDEFGHIJABCDEFGHIJABCDEFGHIJABCDEFGHIJ");
}

Test(keys, a_file_that_others_can_read_is_refused)
{
	struct worker_keys k;
	struct error e = {""};
	cr_expect_eq(read_text(whole, 0640, &k, &e), STATUS_USAGE);
	cr_expect(strstr(e.text, "expected 600"), "%s", e.text);
}

Test(keys, what_is_missing_or_malformed_is_named)
{
	struct worker_keys k;
	struct error e = {""};
	cr_expect_eq(read_text("server-public 0123456789012345678901234567890123456789\n", 0600, &k, &e), STATUS_USAGE);
	cr_expect(strstr(e.text, "client-secret"), "%s", e.text);
	cr_expect_eq(read_text("# one\nclient-public short\n", 0600, &k, &e), STATUS_USAGE);
	cr_expect(strstr(e.text, "line 2"), "%s", e.text);
	cr_expect_eq(read_text("nobodys-key 0123456789012345678901234567890123456789\n", 0600, &k, &e), STATUS_USAGE);
	cr_expect(strstr(e.text, "line 1"), "%s", e.text);
	cr_expect_eq(worker_keys_read(&k, "/no/such/keys", &e), STATUS_USAGE);
	cr_expect(strstr(e.text, "/no/such/keys"), "%s", e.text);
}
