// The part of Criterion that our tests use, for builds under ThreadSanitizer: Criterion's own runner maps memory at
// addresses that ThreadSanitizer keeps for itself, and cannot start there. Each test is a forked process with a deadline.
#ifndef STAGECOACH_TESTS_WITHOUT_CRITERION_H
#define STAGECOACH_TESTS_WITHOUT_CRITERION_H

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct without_test {
	const char *suite, *name;
	void (*run)(void), (*init)(void), (*fini)(void);
	int signal;          // by which the test is to end
	unsigned timeout;    // seconds
	struct without_test *next;
};
static struct without_test *without_tests;
static int without_failures;

#define Test(suite_, name_, ...)                                                                                       \
	static void suite_##_##name_##_run(void);                                                                      \
	static struct without_test suite_##_##name_##_test = {                                                         \
		.suite = #suite_, .name = #name_, .run = suite_##_##name_##_run, __VA_ARGS__};                         \
	__attribute__((constructor)) static void suite_##_##name_##_add(void)                                          \
	{                                                                                                              \
		struct without_test **end = &without_tests;                                                            \
		while (*end)                                                                                           \
			end = &(*end)->next;                                                                           \
		*end = &suite_##_##name_##_test;                                                                       \
	}                                                                                                              \
	static void suite_##_##name_##_run(void)

static inline void without_check(bool ok, bool fatal, const char *what, const char *file, int line, const char *fmt, ...)
{
	if (ok)
		return;
	va_list ap;
	va_start(ap, fmt);
	fprintf(stderr, "%s:%d: failed: %s: ", file, line, what);
	vfprintf(stderr, fmt, ap);
	fputc('\n', stderr);
	va_end(ap);
	without_failures++;
	if (fatal)
		_exit(1);
}

#define WITHOUT_CHECK(fatal, what, ok, ...) without_check((ok), fatal, what, __FILE__, __LINE__, "" __VA_ARGS__)
#define cr_expect(c, ...) WITHOUT_CHECK(false, #c, !!(c), __VA_ARGS__)
#define cr_assert(c, ...) WITHOUT_CHECK(true, #c, !!(c), __VA_ARGS__)
#define cr_expect_not(c, ...) WITHOUT_CHECK(false, "not " #c, !(c), __VA_ARGS__)
#define cr_assert_not(c, ...) WITHOUT_CHECK(true, "not " #c, !(c), __VA_ARGS__)
#define cr_expect_eq(a, b, ...) WITHOUT_CHECK(false, #a " == " #b, (a) == (b), __VA_ARGS__)
#define cr_assert_eq(a, b, ...) WITHOUT_CHECK(true, #a " == " #b, (a) == (b), __VA_ARGS__)
#define cr_expect_neq(a, b, ...) WITHOUT_CHECK(false, #a " != " #b, (a) != (b), __VA_ARGS__)
#define cr_assert_neq(a, b, ...) WITHOUT_CHECK(true, #a " != " #b, (a) != (b), __VA_ARGS__)
#define cr_expect_lt(a, b, ...) WITHOUT_CHECK(false, #a " < " #b, (a) < (b), __VA_ARGS__)
#define cr_assert_lt(a, b, ...) WITHOUT_CHECK(true, #a " < " #b, (a) < (b), __VA_ARGS__)
#define cr_expect_leq(a, b, ...) WITHOUT_CHECK(false, #a " <= " #b, (a) <= (b), __VA_ARGS__)
#define cr_assert_leq(a, b, ...) WITHOUT_CHECK(true, #a " <= " #b, (a) <= (b), __VA_ARGS__)
#define cr_expect_gt(a, b, ...) WITHOUT_CHECK(false, #a " > " #b, (a) > (b), __VA_ARGS__)
#define cr_assert_gt(a, b, ...) WITHOUT_CHECK(true, #a " > " #b, (a) > (b), __VA_ARGS__)
#define cr_expect_geq(a, b, ...) WITHOUT_CHECK(false, #a " >= " #b, (a) >= (b), __VA_ARGS__)
#define cr_assert_geq(a, b, ...) WITHOUT_CHECK(true, #a " >= " #b, (a) >= (b), __VA_ARGS__)
#define cr_expect_null(p, ...) WITHOUT_CHECK(false, #p " is NULL", (p) == NULL, __VA_ARGS__)
#define cr_assert_null(p, ...) WITHOUT_CHECK(true, #p " is NULL", (p) == NULL, __VA_ARGS__)
#define cr_expect_not_null(p, ...) WITHOUT_CHECK(false, #p " is not NULL", (p) != NULL, __VA_ARGS__)
#define cr_assert_not_null(p, ...) WITHOUT_CHECK(true, #p " is not NULL", (p) != NULL, __VA_ARGS__)
#define cr_expect_str_eq(a, b, ...) WITHOUT_CHECK(false, #a " is the text " #b, !strcmp(a, b), __VA_ARGS__)
#define cr_assert_str_eq(a, b, ...) WITHOUT_CHECK(true, #a " is the text " #b, !strcmp(a, b), __VA_ARGS__)
#define cr_expect_float_eq(a, b, e, ...) WITHOUT_CHECK(false, #a " near " #b, fabs((a) - (b)) <= (e), __VA_ARGS__)
#define cr_assert_float_eq(a, b, e, ...) WITHOUT_CHECK(true, #a " near " #b, fabs((a) - (b)) <= (e), __VA_ARGS__)
#define cr_fail(...) WITHOUT_CHECK(false, "cr_fail", false, __VA_ARGS__)
#define cr_assert_fail(...) WITHOUT_CHECK(true, "cr_assert_fail", false, __VA_ARGS__)

#define cr_skip(...) cr_skip_test(__VA_ARGS__)
#define cr_skip_test(...)                                                                                              \
	do {                                                                                                           \
		fprintf(stderr, "skipped: " __VA_ARGS__);                                                              \
		fputc('\n', stderr);                                                                                   \
		_exit(0);                                                                                              \
	} while (0)

static bool without_run(const struct without_test *t)
{
	fflush(NULL);
	if (getenv("STAGECOACH_TEST_IN_PROCESS")) { // for tools that watch one process
		int before = without_failures;
		t->run();
		return without_failures == before;
	}
	pid_t pid = fork();
	if (pid == 0) {
		alarm(t->timeout ? t->timeout * 4 : 200);
		if (t->init)
			t->init();
		t->run();
		if (t->fini)
			t->fini();
		exit(without_failures ? 1 : 0);
	}
	int status = 0;
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return false;
	return t->signal ? WIFSIGNALED(status) && WTERMSIG(status) == t->signal : WIFEXITED(status) && !WEXITSTATUS(status);
}

// Libraries that are not built for ThreadSanitizer hand memory over by means that it does not see.
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
	return "called_from_lib:libzmq.so\nrace:libzmq.so\ncalled_from_lib:libmicrohttpd.so\nrace:libmicrohttpd.so\n";
}

// Words on the command line pick tests by parts of their names.
int main(int argc, char **argv)
{
	int passed = 0, failed = 0;
	for (const struct without_test *t = without_tests; t; t = t->next) {
		bool wanted = argc < 2 || argv[1][0] == '-';
		for (int i = 1; i < argc; i++)
			wanted |= strstr(t->name, argv[i]) != NULL;
		if (!wanted)
			continue;
		if (without_run(t)) {
			passed++;
		} else {
			failed++;
			printf("FAIL %s::%s\n", t->suite, t->name);
		}
	}
	printf("%d passed, %d failed\n", passed, failed);
	return failed || !passed ? 1 : 0;
}

#endif
