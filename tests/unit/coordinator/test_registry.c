// Workers by connection, their places, cores, and what the launcher reports.
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "coordinator/cores.h"
#include "coordinator/launcher.h"
#include "coordinator/registry.h"

static struct registry r;

static struct hub_peer peer(const char *id, int door)
{
	struct hub_peer p = {.id_len = (uint8_t)strlen(id), .door = (uint8_t)door};
	memcpy(p.id, id, p.id_len);
	return p;
}

static enum status hello(const char *id, int door, uint32_t index, const char *host, uint32_t *place)
{
	struct message_hello h = {.protocol_version = 1, .worker_index = index, .incarnation = 5};
	struct hub_peer p = peer(id, door);
	struct error e;
	snprintf(h.host, sizeof h.host, "%s", host);
	return registry_hello(&r, &p, &h, place, &e);
}

Test(registry, a_worker_is_found_by_its_connection_only)
{
	uint32_t place;
	registry_init(&r, 2, 2);
	cr_assert_eq(hello("a", 0, 1, "x", &place), STATUS_OK);
	cr_assert_eq(place, 1u);
	struct hub_peer a = peer("a", 0), other_door = peer("a", 1), b = peer("b", 0);
	cr_assert_eq(registry_find(&r, &a), &r.workers[1]);
	cr_assert_null(registry_find(&r, &other_door));
	cr_assert_null(registry_find(&r, &b));
	cr_assert_eq(hello("b", 0, 1, "x", &place), STATUS_OK); // its successor
	cr_assert_null(registry_find(&r, &a));
	cr_assert_eq(registry_find(&r, &b), &r.workers[1]);
	cr_assert_eq(hello("c", 0, 2, "x", &place), STATUS_INVALID);
}

Test(registry, a_successor_keeps_the_assignment_and_the_totals)
{
	uint32_t place;
	registry_init(&r, 1, 1);
	cr_assert_eq(hello("a", 0, 0, "x", &place), STATUS_OK);
	r.workers[0].assign.n_stages = 1;
	r.workers[0].heartbeat.busy_us = 2000000;
	cr_assert_eq(hello("b", 0, 0, "x", &place), STATUS_OK);
	cr_assert_eq(r.workers[0].assign.n_stages, 1u);
	cr_assert_eq(r.workers[0].heartbeat.busy_us, 0u);
	cr_assert_eq(r.workers[0].busy_before_s, 2.0);
}

Test(registry, workers_of_other_hosts_take_places_in_order_and_come_back_to_theirs)
{
	uint32_t place;
	registry_init(&r, 3, 1);
	cr_assert_eq(hello("a", 1, 0, "far", &place), STATUS_OK);
	cr_assert_eq(place, 1u);
	cr_assert_eq(hello("b", 1, 0, "farther", &place), STATUS_OK);
	cr_assert_eq(place, 2u);
	cr_assert_eq(hello("c", 1, 0, "third", &place), STATUS_INVALID);
	cr_assert_eq(hello("d", 1, 0, "far", &place), STATUS_OK);
	cr_assert_eq(place, 1u);
	registry_forget(&r, 2);
	cr_assert_eq(hello("e", 1, 0, "third", &place), STATUS_OK);
	cr_assert_eq(place, 2u);
}

Test(registry, a_banned_peer_stays_so_while_many_others_are_not)
{
	registry_init(&r, 1, 1);
	struct hub_peer a = peer("a", 0), b = peer("b", 0);
	registry_ban(&r, &a);
	cr_assert(registry_is_banned(&r, &a));
	cr_assert(!registry_is_banned(&r, &b));
	for (int i = 0; i < 1000; i++)
		registry_ban(&r, &b);
	cr_assert(registry_is_banned(&r, &b));
}

Test(cores, nobody_shares_a_core_where_there_are_enough)
{
	static const struct { uint32_t cores, n, wanted[4], counts[4]; bool enough; } rows[] = {
		{2, 2, {1, 1}, {1, 1}, true}, {2, 1, {2}, {2}, true}, {8, 2, {0, 0}, {4, 4}, true}, {8, 3, {2, 0, 0}, {2, 3, 3}, true},
		{7, 2, {0, 0}, {3, 4}, true}, {2, 3, {0, 0, 0}, {1, 1, 1}, false}, {2, 2, {2, 1}, {2, 1}, false},
		{4, 2, {4, 0}, {4, 1}, false}, {1, 1, {0}, {1}, true}, {0, 1, {0}, {1}, false},
	};
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		struct cores_share s[4] = {{0}};
		uint32_t used = 0;
		for (uint32_t k = 0; k < rows[i].n; k++)
			s[k].wanted = rows[i].wanted[k];
		cr_assert_eq(cores_hand_out(rows[i].cores, s, rows[i].n), rows[i].enough, "row %zu", i);
		for (uint32_t k = 0; k < rows[i].n; k++) {
			cr_assert_eq(s[k].count, rows[i].counts[k], "row %zu, share %u: %u", i, k, s[k].count);
			if (rows[i].enough)
				cr_assert_eq(s[k].first, used, "row %zu, share %u begins at %u", i, k, s[k].first);
			used += s[k].count;
		}
	}
}

Test(cores, this_host_names_each_of_its_cores_once)
{
	uint32_t cores[CORES_MAX], n = cores_of_host(cores);
	cr_assert_geq(n, 1u);
	for (uint32_t i = 0; i < n; i++)
		for (uint32_t k = 0; k < i; k++)
			cr_assert_neq(cores[i], cores[k]);
}

Test(launcher, reports_arrive_in_pieces_and_lines_that_are_not_understood_are_passed_over)
{
	static const char text[] = "{\"exit\":1,\"pid\":77,\"how\":\"exit status 3\",\"log\":\"a\\nb\"}\nnonsense\n{\"exit\":-4}\n"
	                           "{\"exit\":0,\"pid\":78,\"how\":\"signal 9 (SIGKILL)\"}\n";
	int fds[2];
	struct launcher l;
	struct launcher_exit x[3];
	int n = 0;
	cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
	launcher_init(&l, fds[1]);
	for (size_t i = 0; i < sizeof text - 1; i++) {
		cr_assert_eq(write(fds[0], &text[i], 1), 1);
		while (n < 3 && launcher_next_exit(&l, &x[n]))
			n++;
	}
	cr_assert_eq(n, 2);
	cr_assert(x[0].worker == 1 && x[0].pid == 77 && x[0].exit_status == 3 && !strcmp(x[0].log, "a\nb"));
	cr_assert(x[1].worker == 0 && x[1].exit_status == -1 && !strcmp(x[1].how, "signal 9 (SIGKILL)"));
	char line[64] = "";
	launcher_restart(&l, 1);
	cr_assert_gt(read(fds[0], line, sizeof line - 1), 0);
	cr_assert_str_eq(line, "{\"restart\":1}\n");
	close(fds[0]);
	cr_assert(!launcher_next_exit(&l, &x[2]));
	cr_assert_eq(l.fd, -1);
	launcher_kill(&l, 0); // nobody listens: nothing happens
}
