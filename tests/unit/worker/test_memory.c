// Budgets against made-up files of /proc and /sys.
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "worker/memory.h"

static char root[64];
#define GIB (1ull << 30)

static void put(const char *path, const char *text)
{
	char full[512];
	snprintf(full, sizeof full, "%s%s", root, path);
	for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')); p++) {
		*p = 0;
		mkdir(full, 0700);
		*p = '/';
	}
	FILE *f = fopen(full, "w");
	cr_assert_not_null(f, "%s", full);
	fputs(text, f);
	fclose(f);
}

static void setup(void)
{
	strcpy(root, "/tmp/stagecoach-memory-XXXXXX");
	cr_assert_not_null(mkdtemp(root));
	put("/proc/meminfo", "MemTotal:       33554432 kB\nMemFree:         1000000 kB\nMemAvailable:   16777216 kB\n");
}

static void teardown(void)
{
	char command[128];
	snprintf(command, sizeof command, "rm -r '%s'", root);
	cr_expect_eq(system(command), 0);
}

Test(memory, without_a_cgroup_the_machine_is_the_limit, .init = setup, .fini = teardown)
{
	struct memory_state m;
	memory_read(&m, root);
	cr_expect_eq(m.total_bytes, 32 * GIB);
	cr_expect_eq(m.available_bytes, 16 * GIB);
	cr_expect_not(m.in_cgroup);
}

Test(memory, a_v2_limit_counts_without_the_cached_files, .init = setup, .fini = teardown)
{
	struct memory_state m;
	put("/proc/self/cgroup", "0::/user/job\n");
	put("/sys/fs/cgroup/user/job/memory.max", "4294967296\n");
	put("/sys/fs/cgroup/user/job/memory.current", "3221225472\n");
	put("/sys/fs/cgroup/user/job/memory.stat", "anon 1073741824\nfile 2147483648\ninactive_file 1073741824\nactive_file 1073741824\n");
	memory_read(&m, root);
	cr_expect_eq(m.total_bytes, 4 * GIB);
	cr_expect_eq(m.available_bytes, 3 * GIB, "%llu", (unsigned long long)m.available_bytes);
	cr_expect(m.in_cgroup);
}

Test(memory, a_limit_of_a_parent_binds, .init = setup, .fini = teardown)
{
	struct memory_state m;
	put("/proc/self/cgroup", "0::/user/job\n");
	put("/sys/fs/cgroup/user/job/memory.max", "max\n");
	put("/sys/fs/cgroup/user/memory.max", "8589934592\n");
	put("/sys/fs/cgroup/user/memory.current", "0\n");
	memory_read(&m, root);
	cr_expect_eq(m.total_bytes, 8 * GIB);
	cr_expect_eq(m.available_bytes, 8 * GIB);
}

Test(memory, a_v1_limit_counts, .init = setup, .fini = teardown)
{
	struct memory_state m;
	put("/proc/self/cgroup", "12:cpu,cpuacct:/x\n9:memory:/box\n0::/\n");
	put("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", "2147483648\n");
	put("/sys/fs/cgroup/memory/box/memory.usage_in_bytes", "1073741824\n");
	put("/sys/fs/cgroup/memory/box/memory.stat", "cache 5\ntotal_active_file 0\ntotal_inactive_file 536870912\n");
	memory_read(&m, root);
	cr_expect_eq(m.total_bytes, 2 * GIB);
	cr_expect_eq(m.available_bytes, GIB + GIB / 2);
}

Test(memory, a_v1_limit_of_nearly_all_there_is_means_none, .init = setup, .fini = teardown)
{
	struct memory_state m;
	put("/proc/self/cgroup", "9:memory:/\n");
	put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
	put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n");
	memory_read(&m, root);
	cr_expect_eq(m.total_bytes, 32 * GIB);
	cr_expect_eq(m.available_bytes, 16 * GIB);
}

Test(memory, a_path_of_another_namespace_falls_back_to_the_mount, .init = setup, .fini = teardown)
{
	struct memory_state m;
	put("/proc/self/cgroup", "0::/../outside/container\n");
	put("/sys/fs/cgroup/memory.max", "1073741824\n");
	put("/sys/fs/cgroup/memory.current", "0\n");
	memory_read(&m, root);
	cr_expect_eq(m.total_bytes, GIB);
}

Test(memory, workers_that_share_a_value_share_its_bytes)
{
	struct memory_state m = {.total_bytes = 8 * GIB, .available_bytes = 4 * GIB};
	struct option_memory bytes = {.bytes = GIB}, half = {.is_fraction = true, .fraction = 0.25};
	cr_expect_eq(memory_limit(&m, NULL, 2), GIB);
	cr_expect_eq(memory_limit(&m, &half, 1), GIB);
	cr_expect_eq(memory_limit(&m, &half, 4), GIB / 4);
	cr_expect_eq(memory_limit(&m, &bytes, 2), GIB / 2);
	cr_expect_eq(memory_limit(&m, &bytes, 1), GIB);
}

Test(memory, a_process_knows_what_it_holds)
{
	struct memory_usage u;
	memory_of_self(&u);
	cr_expect_gt(u.rss_bytes, 100000);
	cr_expect_leq(u.private_bytes, u.rss_bytes);
}
