// The socket transport: frames arrive in order into buffers posted ahead, and whatever goes wrong wakes the waiter with a
// status that says what.
#include <criterion/criterion.h>
#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "worker/transport.h"

static const struct transport *const t = &transport_socket;
static char folder[64];
static void *listener;
static char address[256];
static struct error e;

static void setup(void)
{
	strcpy(folder, "/tmp/stagecoach-transport-XXXXXX");
	cr_assert_not_null(mkdtemp(folder));
	cr_assert_eq(t->listen(&listener, folder, address, sizeof address, &e), STATUS_OK, "%s", e.text);
}

static void teardown(void)
{
	t->close_listener(&listener);
	cr_expect_eq(rmdir(folder), 0, "the socket is left behind");
}

static void join(uint32_t epoch, struct edge **out, struct edge **in)
{
	cr_assert_eq(t->connect(address, epoch, FRAME_HIDDEN, 1000, out, &e), STATUS_OK, "%s", e.text);
	cr_assert_eq(t->accept(listener, epoch, FRAME_HIDDEN, 1000, in, &e), STATUS_OK, "%s", e.text);
}

static void expect_frames(struct edge *out, struct edge *in, size_t bytes)
{
	char *a = malloc(bytes), *b = malloc(bytes), *c = malloc(bytes);
	memset(a, 1, bytes);
	cr_expect_eq(t->post_receive(in, 7, b, bytes, &e), STATUS_OK);
	cr_expect_eq(t->post_receive(in, 8, c, bytes, &e), STATUS_OK);
	cr_expect_eq(t->send(out, 7, a, bytes, &e), STATUS_OK, "%s", e.text);
	memset(a, 2, bytes); // the buffer is the caller's again
	cr_expect_eq(t->send(out, 8, a, bytes, &e), STATUS_OK, "%s", e.text);
	cr_expect_eq(t->wait_receive(in, 5000, &e), STATUS_OK, "%s", e.text);
	cr_expect_eq(t->wait_receive(in, 5000, &e), STATUS_OK, "%s", e.text);
	for (size_t i = 0; i < bytes; i++) {
		cr_assert_eq(b[i], 1, "byte %zu of %zu is %d, expected 1", i, bytes, b[i]);
		cr_assert_eq(c[i], 2, "byte %zu of %zu is %d, expected 2", i, bytes, c[i]);
	}
	free(a);
	free(b);
	free(c);
}

Test(transport, frames_of_any_size_arrive_in_order, .init = setup, .fini = teardown)
{
	struct edge *out, *in;
	join(1, &out, &in);
	expect_frames(out, in, 4);
	expect_frames(out, in, 2304);
	t->close(&out);
	t->close(&in);
}

struct sender { struct edge *edge; size_t bytes; int n; };

static void *send_many(void *arg)
{
	struct sender *s = arg;
	char *data = malloc(s->bytes);
	for (int i = 0; i < s->n; i++) {
		memset(data, i + 1, s->bytes);
		if (t->send(s->edge, (uint64_t)i + 1, data, s->bytes, NULL) != STATUS_OK)
			break;
	}
	free(data);
	return NULL;
}

Test(transport, large_frames_arrive_while_nobody_waits_for_them, .init = setup, .fini = teardown, .timeout = 60)
{
	struct edge *out, *in;
	enum { BYTES = 3 << 20, N = 6 };
	join(1, &out, &in);
	struct sender s = {.edge = out, .bytes = BYTES, .n = N};
	char *buffer[N];
	for (int i = 0; i < N; i++) {
		buffer[i] = malloc(BYTES);
		cr_assert_eq(t->post_receive(in, (uint64_t)i + 1, buffer[i], BYTES, &e), STATUS_OK);
	}
	pthread_t thread;
	pthread_create(&thread, NULL, send_many, &s);
	pthread_join(thread, NULL); // 18 MB are more than the kernel holds: the receiver must have read them on its own
	for (int i = 0; i < N; i++) {
		cr_assert_eq(t->wait_receive(in, 5000, &e), STATUS_OK, "%s", e.text);
		cr_assert_eq(buffer[i][0], i + 1);
		cr_assert_eq(buffer[i][BYTES - 1], i + 1);
		free(buffer[i]);
	}
	t->close(&out);
	t->close(&in);
}

Test(transport, tcp_on_loopback_works_too)
{
	void *l;
	char where[64];
	struct edge *out, *in;
	cr_assert_eq(t->listen(&l, "tcp:127.0.0.1:0", where, sizeof where, &e), STATUS_OK, "%s", e.text);
	cr_assert_eq(t->connect(where, 3, FRAME_IDS, 1000, &out, &e), STATUS_OK, "%s", e.text);
	cr_assert_eq(t->accept(l, 3, FRAME_IDS, 1000, &in, &e), STATUS_OK, "%s", e.text);
	expect_frames(out, in, 1024);
	t->close(&out);
	t->close(&in);
	t->close_listener(&l);
}

Test(transport, an_address_beyond_loopback_is_refused_by_name)
{
	void *l;
	char where[64];
	struct edge *out;
	cr_expect_eq(t->listen(&l, "tcp:0.0.0.0:0", where, sizeof where, &e), STATUS_UNAVAILABLE);
	cr_expect(strstr(e.text, "beyond loopback"), "%s", e.text);
	cr_expect_eq(t->connect("tcp:10.0.0.1:80", 1, FRAME_IDS, 100, &out, &e), STATUS_UNAVAILABLE);
	cr_expect(strstr(e.text, "beyond loopback"), "%s", e.text);
}

Test(transport, a_peer_of_an_epoch_that_is_over_is_turned_away, .init = setup, .fini = teardown)
{
	struct edge *stale, *out, *in, *nobody;
	char byte = 0;
	cr_assert_eq(t->connect(address, 4, FRAME_HIDDEN, 1000, &stale, &e), STATUS_OK);
	cr_expect_eq(t->accept(listener, 5, FRAME_HIDDEN, 50, &nobody, &e), STATUS_TIMEOUT);
	cr_assert_eq(t->post_receive(stale, 1, &byte, 1, &e), STATUS_OK);
	cr_expect_eq(t->wait_receive(stale, 2000, &e), STATUS_CLOSED);
	t->close(&stale);
	join(5, &out, &in);
	expect_frames(out, in, 16);
	t->close(&out);
	t->close(&in);
}

Test(transport, a_peer_that_comes_early_for_a_later_epoch_is_kept, .init = setup, .fini = teardown)
{
	struct edge *early, *in, *nobody;
	cr_assert_eq(t->connect(address, 6, FRAME_HIDDEN, 1000, &early, &e), STATUS_OK);
	cr_expect_eq(t->accept(listener, 5, FRAME_HIDDEN, 50, &nobody, &e), STATUS_TIMEOUT);
	cr_assert_eq(t->accept(listener, 6, FRAME_HIDDEN, 1000, &in, &e), STATUS_OK, "%s", e.text);
	expect_frames(early, in, 16);
	t->close(&early);
	t->close(&in);
}

Test(transport, a_peer_that_closes_in_the_middle_of_a_frame_wakes_the_waiter, .init = setup, .fini = teardown)
{
	char half[100], buffer[200];
	struct edge *in;
	struct { uint32_t magic, epoch, kind, zero; } hello = {0x48435453, 1, FRAME_HIDDEN, 0};
	struct frame_header header = {.magic = 0x46435453, .epoch = 1, .step = 1, .kind = FRAME_HIDDEN, .bytes = 200};
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	memset(half, 9, sizeof half);
	strcpy(a.sun_path, address + 5);
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	cr_assert_eq(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
	cr_assert_eq(write(fd, &hello, sizeof hello), (ssize_t)sizeof hello);
	cr_assert_eq(t->accept(listener, 1, FRAME_HIDDEN, 1000, &in, &e), STATUS_OK, "%s", e.text);
	cr_assert_eq(t->post_receive(in, 1, buffer, sizeof buffer, &e), STATUS_OK);
	cr_assert_eq(write(fd, &header, sizeof header), (ssize_t)sizeof header);
	cr_assert_eq(write(fd, half, sizeof half), (ssize_t)sizeof half);
	cr_expect_eq(t->wait_receive(in, 30, &e), STATUS_TIMEOUT);
	close(fd);
	cr_expect_eq(t->wait_receive(in, 2000, &e), STATUS_CLOSED, "%s", e.text);
	t->close(&in);
}

Test(transport, a_connection_that_says_nonsense_is_dropped_and_the_next_one_served, .init = setup, .fini = teardown)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	struct edge *out, *in;
	strcpy(a.sun_path, address + 5);
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	cr_assert_eq(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
	cr_assert_eq(write(fd, "GET / HTTP/1.1\r\n\r\n", 18), 18);
	join(1, &out, &in);
	expect_frames(out, in, 16);
	t->close(&out);
	t->close(&in);
	close(fd);
}

Test(transport, a_frame_that_was_not_due_is_an_error_and_not_data, .init = setup, .fini = teardown)
{
	struct edge *out, *in;
	char buffer[64] = {0};
	join(1, &out, &in);
	cr_assert_eq(t->post_receive(in, 2, buffer, sizeof buffer, &e), STATUS_OK);
	cr_assert_eq(t->send(out, 3, buffer, sizeof buffer, &e), STATUS_OK);
	cr_expect_eq(t->wait_receive(in, 2000, &e), STATUS_INVALID);
	cr_expect(strstr(e.text, "step 3") && strstr(e.text, "step 2"), "%s", e.text);
	t->close(&out);
	t->close(&in);
}

static void *abort_later(void *edge)
{
	usleep(50000);
	t->abort(edge);
	return NULL;
}

static void expect_abort_wakes(size_t bytes)
{
	struct edge *out, *in;
	char *buffer = calloc(1, bytes);
	pthread_t thread;
	join(1, &out, &in);
	cr_assert_eq(t->post_receive(in, 1, buffer, bytes, &e), STATUS_OK);
	pthread_create(&thread, NULL, abort_later, in);
	cr_expect_eq(t->wait_receive(in, 20000, &e), STATUS_CLOSED);
	pthread_join(thread, NULL);
	cr_expect_eq(t->wait_receive(in, 20000, &e), STATUS_CLOSED, "and stays so");
	t->close(&out);
	t->close(&in);
	free(buffer);
}

Test(transport, abort_from_another_thread_wakes_a_receiver, .init = setup, .fini = teardown, .timeout = 10)
{
	expect_abort_wakes(16);
	expect_abort_wakes(1 << 20);
}

Test(transport, abort_from_another_thread_wakes_a_sender, .init = setup, .fini = teardown, .timeout = 10)
{
	struct edge *out, *in;
	size_t bytes = 64 << 20; // nobody reads: the kernel's buffer fills
	char *buffer = calloc(1, bytes);
	pthread_t thread;
	join(1, &out, &in);
	pthread_create(&thread, NULL, abort_later, out);
	cr_expect_eq(t->send(out, 1, buffer, bytes, &e), STATUS_CLOSED);
	pthread_join(thread, NULL);
	t->close(&out);
	t->close(&in);
	free(buffer);
}

Test(transport, an_address_that_nobody_listens_on_times_out)
{
	struct edge *out;
	cr_expect_eq(t->connect("unix:/tmp/stagecoach-no-such-socket", 1, FRAME_IDS, 30, &out, &e), STATUS_TIMEOUT);
	cr_expect(strstr(e.text, "stagecoach-no-such-socket"), "%s", e.text);
}

Test(transport, the_socket_is_closed_to_other_users, .init = setup, .fini = teardown)
{
	struct stat s;
	cr_assert_eq(stat(address + 5, &s), 0);
	cr_expect_eq(s.st_mode & 077, 0);
}
