// See hub.h.
#include "coordinator/hub.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "common/log.h"
#include "coordinator/hub_keys.h"

enum {
	DOORS = 2,
	CONTROL_DEPTH = 1000, // messages of one peer that wait
	STEP_DEPTH = 1024,    // steps that a follower may be behind before it has failed
};

struct door {
	void *control, *monitor, *steps;
	bool keyed;
};

struct hub {
	struct hub_options o;
	char run_dir[4096], host[256];
	uint32_t port; // of the listening address; 0 none
	struct hub_keys keys;
	void *context;
	struct door doors[DOORS];
	uint32_t next_door;  // where hub_receive looks first
	zmq_msg_t message;   // what hub_receive gave out last
	bool holds_message;
	char steps_path[4200];
};

static enum status zmq_failed(struct error *e, enum status s, const char *what, const char *where)
{
	int code = zmq_errno();
	return error_set(e, s, "%s %s: %s", what, where, code == EADDRINUSE ? "already in use" : zmq_strerror(code));
}

static enum status set_int(void *socket, int option, int value, const char *name, struct error *e)
{
	if (zmq_setsockopt(socket, option, &value, sizeof value))
		return zmq_failed(e, STATUS_FATAL, "cannot set", name);
	return STATUS_OK;
}

// What every socket gets: limits, no lingering, keys where the door has them.
static enum status open_socket(struct hub *h, struct door *d, int type, int depth, void **out, struct error *e)
{
	void *s = *out = zmq_socket(h->context, type);
	if (!s)
		return zmq_failed(e, STATUS_FATAL, "cannot open", "a ZeroMQ socket");
	TRY(set_int(s, ZMQ_LINGER, 0, "linger", e));
	TRY(set_int(s, ZMQ_SNDHWM, depth, "send depth", e));
	TRY(set_int(s, ZMQ_RCVHWM, depth, "receive depth", e));
	int64_t most = (int64_t)h->o.max_message_bytes;
	if (zmq_setsockopt(s, ZMQ_MAXMSGSIZE, &most, sizeof most))
		return zmq_failed(e, STATUS_FATAL, "cannot set", "message size");
	if (d->keyed) {
		TRY(set_int(s, ZMQ_CURVE_SERVER, 1, "CURVE", e));
		if (zmq_setsockopt(s, ZMQ_CURVE_SECRETKEY, h->keys.server_secret, HUB_KEY_CHARS + 1) ||
		    zmq_setsockopt(s, ZMQ_ZAP_DOMAIN, "stagecoach", 10))
			return zmq_failed(e, STATUS_FATAL, "cannot set", "CURVE keys");
	}
	return STATUS_OK;
}

static enum status open_control(struct hub *h, uint32_t door, const char *endpoint, struct error *e)
{
	struct door *d = &h->doors[door];
	char name[64];
	int closed = ZMQ_EVENT_DISCONNECTED;
	TRY(open_socket(h, d, ZMQ_ROUTER, CONTROL_DEPTH, &d->control, e));
	TRY(set_int(d->control, ZMQ_ROUTER_MANDATORY, 1, "mandatory routing", e));
	snprintf(name, sizeof name, "inproc://monitor-%u", door);
	d->monitor = zmq_socket(h->context, ZMQ_PAIR);
	if (!d->monitor || zmq_socket_monitor(d->control, name, closed) || zmq_connect(d->monitor, name))
		return zmq_failed(e, STATUS_FATAL, "cannot watch", "connections");
	TRY(set_int(d->monitor, ZMQ_LINGER, 0, "linger", e));
	if (zmq_bind(d->control, endpoint))
		return zmq_failed(e, STATUS_UNAVAILABLE, "control address", endpoint);
	return STATUS_OK;
}

static bool is_loopback(const char *host)
{
	return !strncmp(host, "127.", 4) || !strcmp(host, "localhost") || !strcmp(host, "[::1]");
}

static enum status split_listen(struct hub *h, struct error *e)
{
	const char *colon = strrchr(h->o.listen, ':');
	char *end = NULL;
	long port = colon ? strtol(colon + 1, &end, 10) : 0;
	if (!colon || colon == h->o.listen || !end || *end || port < 1 || port > 65534)
		return error_set(e, STATUS_USAGE, "--listen %s: expected HOST:PORT with a port from 1 to 65534", h->o.listen);
	snprintf(h->host, sizeof h->host, "%.*s", (int)(colon - h->o.listen), h->o.listen);
	h->port = (uint32_t)port;
	bool keys = h->o.key_file && *h->o.key_file;
	if (!keys && !is_loopback(h->host))
		return error_set(e, STATUS_USAGE, "--listen %s is beyond this machine and needs --key-file", h->o.listen);
	if (keys) {
		if (access(h->o.key_file, F_OK) && errno == ENOENT) {
			char worker_file[4200];
			snprintf(worker_file, sizeof worker_file, "%s.worker", h->o.key_file);
			TRY(hub_keys_write_new(h->o.key_file, worker_file, e));
			log_info("wrote new keys to %s; workers of other hosts take a copy of %s", h->o.key_file, worker_file);
		}
		TRY(hub_keys_read(&h->keys, h->o.key_file, e));
		if (!h->keys.server_secret[0])
			return error_set(e, STATUS_USAGE, "%s has no server-secret", h->o.key_file);
		TRY(hub_keys_guard(&h->keys, h->context, e));
		h->doors[1].keyed = true;
	}
	return STATUS_OK;
}

// Stale sockets of a former owner are replaced by bind; of a living one too, so the caller holds a lock on the folder.
enum status hub_create(struct hub **out, const struct hub_options *o, struct error *e)
{
	struct hub *h = xcalloc(1, sizeof *h);
	enum status status;
	char endpoint[4300];
	h->o = *o;
	snprintf(h->run_dir, sizeof h->run_dir, "%s", o->run_dir);
	h->context = zmq_ctx_new();
	if (!h->context) {
		status = zmq_failed(e, STATUS_FATAL, "cannot start", "ZeroMQ");
		goto out;
	}
	// A Unix socket's path has 107 bytes at most.
	if (strlen(o->run_dir) > 80) {
		status = error_set(e, STATUS_USAGE, "--run-dir %s is longer than 80 bytes", o->run_dir);
		goto out;
	}
	snprintf(endpoint, sizeof endpoint, "ipc://%s/control", h->run_dir);
	TRY_GOTO(open_control(h, 0, endpoint, e), out);
	if (o->listen && *o->listen) {
		TRY_GOTO(split_listen(h, e), out);
		snprintf(endpoint, sizeof endpoint, "tcp://%s:%u", h->host, h->port);
		TRY_GOTO(open_control(h, 1, endpoint, e), out);
	}
	*out = h;
	return STATUS_OK;
out:
	hub_destroy(&h);
	return status;
}

static void close_socket(void **s)
{
	if (*s)
		zmq_close(*s);
	*s = NULL;
}

void hub_destroy(struct hub **hub)
{
	struct hub *h = *hub;
	if (!h)
		return;
	if (h->holds_message)
		zmq_msg_close(&h->message);
	for (uint32_t i = 0; i < DOORS; i++) {
		if (h->doors[i].control)
			zmq_socket_monitor(h->doors[i].control, NULL, 0);
		close_socket(&h->doors[i].monitor);
		close_socket(&h->doors[i].control);
		close_socket(&h->doors[i].steps);
	}
	hub_keys_unguard(&h->keys);
	if (h->context)
		zmq_ctx_term(h->context);
	if (h->steps_path[0])
		unlink(h->steps_path);
	free(h);
	*hub = NULL;
}

enum status hub_begin_epoch(struct hub *h, uint32_t epoch, char endpoint[2][256], struct error *e)
{
	for (uint32_t i = 0; i < DOORS; i++)
		close_socket(&h->doors[i].steps);
	if (h->steps_path[0])
		unlink(h->steps_path);
	for (uint32_t i = 0; i < DOORS; i++) {
		struct door *d = &h->doors[i];
		endpoint[i][0] = 0;
		if (!d->control)
			continue;
		TRY(open_socket(h, d, ZMQ_XPUB, STEP_DEPTH, &d->steps, e));
		TRY(set_int(d->steps, ZMQ_XPUB_NODROP, 1, "no dropping", e));
		TRY(set_int(d->steps, ZMQ_XPUB_VERBOSE, 1, "verbose subscriptions", e));
		// The port is taken afresh in each epoch, because the old one may still be closing.
		if (i == 0)
			snprintf(endpoint[i], 256, "ipc://%.80s/steps-%u", h->run_dir, epoch);
		else
			snprintf(endpoint[i], 256, "tcp://%.200s:*", h->host);
		if (zmq_bind(d->steps, endpoint[i]))
			return zmq_failed(e, STATUS_UNAVAILABLE, "step address", endpoint[i]);
		size_t size = 256;
		if (i == 1 && zmq_getsockopt(d->steps, ZMQ_LAST_ENDPOINT, endpoint[i], &size))
			return zmq_failed(e, STATUS_FATAL, "cannot read", "the step address");
	}
	snprintf(h->steps_path, sizeof h->steps_path, "%s/steps-%u", h->run_dir, epoch);
	return STATUS_OK;
}

void hub_wait(struct hub *h, const int *fds, uint32_t n, unsigned timeout_ms)
{
	zmq_pollitem_t items[3 * DOORS + 4];
	int count = 0;
	ASSERT(n <= 4);
	for (uint32_t i = 0; i < DOORS; i++) {
		if (!h->doors[i].control)
			continue;
		items[count++] = (zmq_pollitem_t){.socket = h->doors[i].control, .events = ZMQ_POLLIN};
		items[count++] = (zmq_pollitem_t){.socket = h->doors[i].monitor, .events = ZMQ_POLLIN};
	}
	for (uint32_t i = 0; i < n; i++)
		if (fds[i] >= 0)
			items[count++] = (zmq_pollitem_t){.fd = fds[i], .events = ZMQ_POLLIN};
	zmq_poll(items, count, timeout_ms);
}

static bool more(void *socket)
{
	int value = 0;
	size_t size = sizeof value;
	return !zmq_getsockopt(socket, ZMQ_RCVMORE, &value, &size) && value;
}

// Takes one whole message of two parts; false if there is none. Others are thrown away, part by part.
static bool receive_from(struct hub *h, uint32_t door, struct hub_peer *from)
{
	void *s = h->doors[door].control;
	for (;;) {
		zmq_msg_t id;
		zmq_msg_init(&id);
		int n = zmq_msg_recv(&id, s, ZMQ_DONTWAIT);
		bool fits = n > 0 && (size_t)n <= sizeof from->id;
		if (fits) {
			from->door = (uint8_t)door;
			from->id_len = (uint8_t)n;
			memcpy(from->id, zmq_msg_data(&id), (size_t)n);
		}
		zmq_msg_close(&id);
		if (n < 0)
			return false;
		zmq_msg_init(&h->message);
		h->holds_message = more(s) && zmq_msg_recv(&h->message, s, ZMQ_DONTWAIT) >= 0;
		if (fits && h->holds_message && !more(s))
			return true;
		while (more(s)) {
			zmq_msg_close(&h->message);
			zmq_msg_init(&h->message);
			if (zmq_msg_recv(&h->message, s, ZMQ_DONTWAIT) < 0)
				break;
		}
		zmq_msg_close(&h->message);
		h->holds_message = false;
	}
}

enum status hub_receive(struct hub *h, struct hub_peer *from, const uint8_t **data, size_t *len)
{
	if (h->holds_message)
		zmq_msg_close(&h->message);
	h->holds_message = false;
	for (uint32_t i = 0; i < DOORS; i++) {
		uint32_t door = (h->next_door + i) % DOORS;
		if (!h->doors[door].control || !receive_from(h, door, from))
			continue;
		h->next_door = (door + 1) % DOORS;
		*data = zmq_msg_data(&h->message);
		*len = zmq_msg_size(&h->message);
		return STATUS_OK;
	}
	return STATUS_ABSENT;
}

bool hub_disconnected(struct hub *h)
{
	bool any = false;
	for (uint32_t i = 0; i < DOORS; i++) {
		char bytes[512];
		if (!h->doors[i].monitor)
			continue;
		// Two parts each: the event, the address.
		while (zmq_recv(h->doors[i].monitor, bytes, sizeof bytes, ZMQ_DONTWAIT) >= 0)
			any = true;
		// Subscriptions are read and thrown away, so that they do not pile up.
		while (h->doors[i].steps && zmq_recv(h->doors[i].steps, bytes, sizeof bytes, ZMQ_DONTWAIT) >= 0)
			;
	}
	return any;
}

enum status hub_send(struct hub *h, const struct hub_peer *to, const uint8_t *data, size_t len)
{
	void *s = h->doors[to->door].control;
	if (zmq_send(s, to->id, to->id_len, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
		return zmq_errno() == EAGAIN ? STATUS_BUSY : STATUS_CLOSED;
	if (zmq_send(s, data, len, ZMQ_DONTWAIT) < 0)
		return zmq_errno() == EAGAIN ? STATUS_BUSY : STATUS_CLOSED;
	return STATUS_OK;
}

enum status hub_broadcast(struct hub *h, const uint8_t *data, size_t len)
{
	for (uint32_t i = 0; i < DOORS; i++)
		if (h->doors[i].steps && zmq_send(h->doors[i].steps, data, len, ZMQ_DONTWAIT) < 0)
			return STATUS_BUSY;
	return STATUS_OK;
}

bool hub_peer_equal(const struct hub_peer *a, const struct hub_peer *b)
{
	return a->door == b->door && a->id_len == b->id_len && !memcmp(a->id, b->id, a->id_len);
}
