// The coordinator's sockets: who is heard, who is not, and that a follower that does not read never blocks anybody.
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include "common/log.h"
#include "coordinator/hub.h"
#include "coordinator/hub_keys.h"

static char dir[64];

static void setup(void)
{
	strcpy(dir, "/tmp/stagecoach-hub.XXXXXX");
	cr_assert(mkdtemp(dir));
	log_set_level(LOG_ERROR);
}

static void teardown(void)
{
	char command[128];
	snprintf(command, sizeof command, "rm -rf %s", dir);
	cr_assert_eq(system(command), 0);
}

static const char *path(const char *name)
{
	static char text[4][128];
	static int k;
	char *t = text[k++ % 4];
	snprintf(t, 128, "%s/%s", dir, name);
	return t;
}

// A port that was free a moment ago.
static unsigned free_port(void)
{
	void *c = zmq_ctx_new(), *s = zmq_socket(c, ZMQ_ROUTER);
	char endpoint[64];
	size_t size = sizeof endpoint;
	cr_assert_eq(zmq_bind(s, "tcp://127.0.0.1:*"), 0);
	zmq_getsockopt(s, ZMQ_LAST_ENDPOINT, endpoint, &size);
	zmq_close(s);
	zmq_ctx_term(c);
	return (unsigned)atoi(strrchr(endpoint, ':') + 1);
}

static struct hub *hub(const char *listen, const char *key_file)
{
	struct hub *h = NULL;
	struct error e = {""};
	struct hub_options o = {.run_dir = dir, .listen = listen, .key_file = key_file, .max_message_bytes = 1 << 20};
	cr_assert_eq(hub_create(&h, &o, &e), STATUS_OK, "%s", e.text);
	return h;
}

struct client { void *context, *socket; };

static struct client dial(const char *endpoint, const char *server, const char *public_key, const char *secret)
{
	struct client c = {zmq_ctx_new(), NULL};
	int zero = 0;
	c.socket = zmq_socket(c.context, ZMQ_DEALER);
	zmq_setsockopt(c.socket, ZMQ_LINGER, &zero, sizeof zero);
	if (server) {
		zmq_setsockopt(c.socket, ZMQ_CURVE_SERVERKEY, server, HUB_KEY_CHARS + 1);
		zmq_setsockopt(c.socket, ZMQ_CURVE_PUBLICKEY, public_key, HUB_KEY_CHARS + 1);
		zmq_setsockopt(c.socket, ZMQ_CURVE_SECRETKEY, secret, HUB_KEY_CHARS + 1);
	}
	cr_assert_eq(zmq_connect(c.socket, endpoint), 0);
	zmq_send(c.socket, "hello", 5, 0);
	return c;
}

static void hang_up(struct client *c)
{
	zmq_close(c->socket);
	zmq_ctx_term(c->context);
}

// Whether a message arrives within the time; from may be NULL.
static bool heard(struct hub *h, unsigned ms, struct hub_peer *from)
{
	const uint8_t *data;
	size_t len;
	struct hub_peer peer;
	for (unsigned waited = 0; waited < ms; waited += 20) {
		usleep(20000);
		hub_disconnected(h);
		if (hub_receive(h, from ? from : &peer, &data, &len) == STATUS_OK) {
			cr_assert(len == 5 && !memcmp(data, "hello", 5));
			return true;
		}
	}
	return false;
}

Test(hub, a_message_comes_with_its_peer_and_an_answer_finds_it, .init = setup, .fini = teardown)
{
	char endpoint[128], answer[16];
	snprintf(endpoint, sizeof endpoint, "ipc://%s/control", dir);
	struct hub *h = hub(NULL, NULL);
	struct client c = dial(endpoint, NULL, NULL, NULL);
	struct hub_peer from;
	cr_assert(heard(h, 5000, &from));
	cr_assert_eq(from.door, 0);
	cr_assert_eq(hub_send(h, &from, (const uint8_t *)"yes", 3), STATUS_OK);
	cr_assert_eq(zmq_recv(c.socket, answer, sizeof answer, 0), 3);
	hang_up(&c);
	bool closed = false;
	for (int i = 0; i < 100 && !(closed = hub_disconnected(h)); i++)
		hub_wait(h, NULL, 0, 20);
	cr_assert(closed);
	enum status s = STATUS_OK;
	for (int i = 0; i < 100 && (s = hub_send(h, &from, (const uint8_t *)"yes", 3)) == STATUS_OK; i++)
		usleep(10000);
	cr_assert_eq(s, STATUS_CLOSED);
	hub_destroy(&h);
}

Test(hub, a_key_file_is_made_and_only_its_holders_are_heard, .init = setup, .fini = teardown)
{
	char listen[64], endpoint[64], other_public[41], other_secret[41];
	struct hub_keys keys;
	struct error e = {""};
	struct stat info;
	unsigned port = free_port();
	snprintf(listen, sizeof listen, "127.0.0.1:%u", port);
	snprintf(endpoint, sizeof endpoint, "tcp://127.0.0.1:%u", port);
	struct hub *h = hub(listen, path("keys"));
	cr_assert_eq(hub_keys_read(&keys, path("keys.worker"), &e), STATUS_OK, "%s", e.text);
	cr_assert(keys.server_secret[0] == 0, "a worker's file holds the server's secret");
	cr_assert(!stat(path("keys"), &info) && (info.st_mode & 0777) == 0600);

	struct client none = dial(endpoint, NULL, NULL, NULL);
	cr_assert(!heard(h, 400, NULL), "a client without keys was heard");
	hang_up(&none);
	zmq_curve_keypair(other_public, other_secret);
	struct client other = dial(endpoint, keys.server_public, other_public, other_secret);
	cr_assert(!heard(h, 400, NULL), "a client with another key was heard");
	hang_up(&other);
	struct hub_peer from;
	struct client ours = dial(endpoint, keys.server_public, keys.client_public, keys.client_secret);
	cr_assert(heard(h, 5000, &from), "a client with the right keys was not heard");
	cr_assert_eq(from.door, 1);
	hang_up(&ours);
	hub_destroy(&h);
}

Test(hub, beyond_loopback_without_keys_is_refused, .init = setup, .fini = teardown)
{
	static const struct { const char *listen, *text; } rows[] = {
		{"0.0.0.0:9000", "beyond this machine"}, {"10.1.2.3:9000", "beyond this machine"}, {"*:9000", "beyond this machine"},
		{"127.0.0.1", "HOST:PORT"}, {"127.0.0.1:x", "HOST:PORT"}, {"127.0.0.1:70000", "HOST:PORT"}, {":9000", "HOST:PORT"},
	};
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		struct hub *h = NULL;
		struct error e = {""};
		struct hub_options o = {.run_dir = dir, .listen = rows[i].listen, .max_message_bytes = 1 << 20};
		cr_assert_eq(hub_create(&h, &o, &e), STATUS_USAGE, "%s", rows[i].listen);
		cr_assert(strstr(e.text, rows[i].text), "%s: %s", rows[i].listen, e.text);
		cr_assert_null(h);
	}
}

Test(hub, a_port_in_use_is_named, .init = setup, .fini = teardown)
{
	char listen[64], run_dir[96];
	struct error e = {""};
	struct hub *second = NULL;
	snprintf(listen, sizeof listen, "127.0.0.1:%u", free_port());
	struct hub *h = hub(listen, NULL);
	snprintf(run_dir, sizeof run_dir, "%s/b", dir);
	cr_assert_eq(mkdir(run_dir, 0700), 0);
	cr_assert_eq(hub_create(&second, &(struct hub_options){.run_dir = run_dir, .listen = listen, .max_message_bytes = 1}, &e), STATUS_UNAVAILABLE);
	cr_assert(strstr(e.text, listen), "%s", e.text);
	hub_destroy(&h);
}

Test(hub, key_files_that_others_can_read_or_that_lie_are_refused, .init = setup, .fini = teardown)
{
	static const struct { const char *text, *says; int mode; } rows[] = {
		{"server-public short\n", "line 1", 0600}, {"unknown 0123456789012345678901234567890123456789\n", "line 1", 0600},
		{"# nothing\n", "lacks", 0600}, {"# nothing\n", "mode", 0644},
	};
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		FILE *f = fopen(path("k"), "w");
		fputs(rows[i].text, f);
		fclose(f);
		cr_assert_eq(chmod(path("k"), (mode_t)rows[i].mode), 0);
		struct hub_keys k;
		struct error e = {""};
		cr_assert_eq(hub_keys_read(&k, path("k"), &e), STATUS_USAGE);
		cr_assert(strstr(e.text, rows[i].says), "%s", e.text);
	}
}

Test(hub, a_follower_that_does_not_read_makes_the_broadcast_busy_and_never_block, .init = setup, .fini = teardown, .timeout = 60)
{
	char endpoints[2][256];
	struct error e = {""};
	struct hub *h = hub(NULL, NULL);
	cr_assert_eq(hub_begin_epoch(h, 7, endpoints, &e), STATUS_OK, "%s", e.text);
	cr_assert(strstr(endpoints[0], "/steps-7") && !endpoints[1][0], "%s", endpoints[0]);
	void *context = zmq_ctx_new(), *sub = zmq_socket(context, ZMQ_SUB);
	int one = 1, zero = 0;
	zmq_setsockopt(sub, ZMQ_RCVHWM, &one, sizeof one);
	zmq_setsockopt(sub, ZMQ_LINGER, &zero, sizeof zero);
	zmq_setsockopt(sub, ZMQ_SUBSCRIBE, "", 0);
	cr_assert_eq(zmq_connect(sub, endpoints[0]), 0);
	static uint8_t big[65536];
	// Until the first one is read, nobody may have subscribed yet.
	char byte;
	for (int i = 0; i < 500 && zmq_recv(sub, &byte, 1, ZMQ_DONTWAIT) < 0; i++) {
		hub_broadcast(h, big, 1);
		hub_disconnected(h);
		usleep(10000);
	}
	enum status s = STATUS_OK;
	int n = 0;
	for (; n < 5000 && s == STATUS_OK; n++)
		s = hub_broadcast(h, big, sizeof big);
	cr_assert_eq(s, STATUS_BUSY, "%d messages of 64 KiB were taken", n);
	zmq_close(sub);
	zmq_ctx_term(context);
	cr_assert_eq(hub_begin_epoch(h, 8, endpoints, &e), STATUS_OK, "%s", e.text);
	hub_destroy(&h);
	cr_assert_neq(access(path("steps-8"), F_OK), 0);
}

Test(hub, messages_of_another_shape_or_size_are_thrown_away, .init = setup, .fini = teardown)
{
	char endpoint[128];
	snprintf(endpoint, sizeof endpoint, "ipc://%s/control", dir);
	struct hub *h = hub(NULL, NULL);
	struct client c = {zmq_ctx_new(), NULL}, large = {zmq_ctx_new(), NULL};
	int zero = 0;
	c.socket = zmq_socket(c.context, ZMQ_DEALER);
	large.socket = zmq_socket(large.context, ZMQ_DEALER);
	zmq_setsockopt(c.socket, ZMQ_LINGER, &zero, sizeof zero);
	zmq_setsockopt(large.socket, ZMQ_LINGER, &zero, sizeof zero);
	zmq_connect(c.socket, endpoint);
	zmq_connect(large.socket, endpoint);
	uint8_t *bytes = calloc(1, 2 << 20);
	zmq_send(large.socket, bytes, 2 << 20, 0); // the connection is closed
	zmq_send(c.socket, "a", 1, ZMQ_SNDMORE);
	zmq_send(c.socket, "b", 1, ZMQ_SNDMORE);
	zmq_send(c.socket, "c", 1, 0);
	zmq_send(c.socket, "hello", 5, 0);
	cr_assert(heard(h, 5000, NULL));
	cr_assert(!heard(h, 200, NULL));
	free(bytes);
	hang_up(&c);
	hang_up(&large);
	hub_destroy(&h);
}
