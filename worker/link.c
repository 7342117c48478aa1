// See link.h. Sockets belong to the link thread; other threads hand over encoded messages and wake it by an eventfd.
#define _GNU_SOURCE
#include "worker/link.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#include "common/log.h"
#include "worker/memory.h"

enum {
	HEARTBEAT_MS = 200,
	WATCH_MS = 250,
	CONTROL_QUEUE = 64,
	OUT_QUEUE = 4096,
	SILENT_EXTRA_MS = 1500,     // a coordinator that is connected but silent gets so much more
	END_AFTER_MS = 1500,        // for the compute thread to notice
};

struct packet { void *data; size_t len; };

struct worker_link {
	struct worker_link_options options;
	struct worker_keys keys;
	void *zmq, *control, *monitor, *steps;
	int wake_fd;
	pthread_t thread;

	pthread_mutex_t lock;
	pthread_cond_t arrived;
	struct packet out[OUT_QUEUE];
	unsigned out_head, out_count;
	struct message in[CONTROL_QUEUE];
	unsigned in_head, in_count;
	struct message step[LINK_QUEUE_STEPS];
	unsigned step_head, step_count;
	bool closing, gone, back, broken;
	bool beating;               // from the hello on
	struct error why;
	// What to subscribe to; taken over by the thread.
	bool resubscribe;
	char endpoint[256];
	uint32_t epoch;             // for heartbeats
	uint32_t taken_epoch;       // whose steps are taken; 0 = none
	struct message_limits limits;

	// Link thread only.
	uint32_t steps_epoch;       // 0 = none
	uint64_t last_step;         // received
	uint64_t begin_ms, lost_since_ms, heard_ms, gone_ms;
	bool was_reached, coordinator_beats, interrupted_gone;
	struct trace_event events[MAX_TRACE_EVENTS];
	uint8_t *buffer;
	size_t capacity;
};

static uint64_t now_ms(void)
{
	return ring_now_us() / 1000;
}

static void wake(struct worker_link *l)
{
	uint64_t one = 1;
	ssize_t n = write(l->wake_fd, &one, sizeof one);
	(void)n;
}

// Link thread: the compute thread learns that it is over, and is freed from waiting for data.
static void interrupt_compute(struct worker_link *l)
{
	if (l->options.interrupt)
		l->options.interrupt(l->options.user);
}

static void mark_broken(struct worker_link *l, const struct error *why)
{
	pthread_mutex_lock(&l->lock);
	if (!l->broken) {
		l->broken = true;
		l->why = *why;
	}
	pthread_cond_signal(&l->arrived);
	pthread_mutex_unlock(&l->lock);
}

static void send_now(struct worker_link *l, const struct message *m)
{
	struct error e;
	size_t len;
	if (message_encode(m, &l->buffer, &len, &l->capacity, &e) != STATUS_OK) {
		log_error("%s not sent: %s", message_type_name(m->type), e.text);
		return;
	}
	if (zmq_send(l->control, l->buffer, len, ZMQ_DONTWAIT) < 0 && errno != EAGAIN)
		log_error("sending a %s: %s", message_type_name(m->type), zmq_strerror(errno));
}

static void send_heartbeat(struct worker_link *l)
{
	struct message m = {.type = MESSAGE_HEARTBEAT};
	struct memory_usage usage;
	ring_report(l->options.ring, &m.heartbeat, l->events);
	memory_of_self(&usage);
	m.heartbeat.rss_bytes = usage.rss_bytes;
	pthread_mutex_lock(&l->lock);
	m.epoch = l->epoch;
	m.heartbeat.queue_length = l->step_count;
	pthread_mutex_unlock(&l->lock);
	send_now(l, &m);
}

static void take_control(struct worker_link *l, const void *data, size_t len)
{
	struct message m;
	struct error e;
	enum status status = message_decode(&m, data, len, NULL, &e);
	l->heard_ms = now_ms();
	if (status != STATUS_OK) {
		log_error("a control message was dropped: %s", e.text);
		return;
	}
	bool interrupt = m.type == MESSAGE_CONFIGURE || m.type == MESSAGE_ERROR;
	if (m.type == MESSAGE_HEARTBEAT)
		l->coordinator_beats = true;
	if (m.type != MESSAGE_ASSIGN && m.type != MESSAGE_CONFIGURE && m.type != MESSAGE_DRAIN && m.type != MESSAGE_ERROR) {
		message_free(&m);
		return;
	}
	if (interrupt) // before the compute thread can see the message and make new edges, which must not be aborted
		interrupt_compute(l);
	pthread_mutex_lock(&l->lock);
	bool full = l->in_count == CONTROL_QUEUE;
	if (!full)
		l->in[(l->in_head + l->in_count++) % CONTROL_QUEUE] = m;
	pthread_cond_signal(&l->arrived);
	pthread_mutex_unlock(&l->lock);
	if (full) {
		log_error("a %s was dropped: %d control messages are waiting", message_type_name(m.type), CONTROL_QUEUE);
		message_free(&m);
	}
}

static void take_step(struct worker_link *l, const void *data, size_t len)
{
	struct message m;
	struct error e;
	enum status status = message_decode(&m, data, len, &l->limits, &e);
	if (status != STATUS_OK) {
		error_prefix(&e, "on the step channel");
		mark_broken(l, &e);
		return;
	}
	if (m.epoch != l->steps_epoch || (m.type != MESSAGE_STEP && m.type != MESSAGE_PROBE)) {
		log_debug("a %s of epoch %u was dropped", message_type_name(m.type), m.epoch);
	} else if (m.type == MESSAGE_PROBE) {
		send_now(l, &(struct message){.type = MESSAGE_READY, .epoch = m.epoch});
	} else if (m.step != l->last_step + 1) {
		error_set(&e, STATUS_INVALID, "step %llu came after step %llu", (unsigned long long)m.step,
		          (unsigned long long)l->last_step);
		mark_broken(l, &e);
	} else {
		l->last_step = m.step;
		pthread_mutex_lock(&l->lock);
		bool full = l->step_count == LINK_QUEUE_STEPS;
		bool current = m.epoch == l->taken_epoch;
		if (!full && current) {
			l->step[(l->step_head + l->step_count++) % LINK_QUEUE_STEPS] = m;
			m.storage = NULL;
		}
		pthread_cond_signal(&l->arrived);
		pthread_mutex_unlock(&l->lock);
		if (full) {
			error_set(&e, STATUS_BUSY, "%d steps are waiting", LINK_QUEUE_STEPS);
			mark_broken(l, &e);
		}
		if (!full && current)
			return;
	}
	message_free(&m);
}

static void drop_steps(struct worker_link *l)
{
	while (l->step_count > 0) {
		message_free(&l->step[l->step_head]);
		l->step_head = (l->step_head + 1) % LINK_QUEUE_STEPS;
		l->step_count--;
	}
}

// Moves to the endpoint that the compute thread named.
static void resubscribe(struct worker_link *l)
{
	char endpoint[256];
	pthread_mutex_lock(&l->lock);
	bool wanted = l->resubscribe;
	l->resubscribe = false;
	memcpy(endpoint, l->endpoint, sizeof endpoint);
	l->steps_epoch = wanted ? l->taken_epoch : l->steps_epoch;
	pthread_mutex_unlock(&l->lock);
	if (!wanted)
		return;
	if (l->steps)
		zmq_close(l->steps);
	l->steps = NULL;
	l->last_step = 0;
	if (!endpoint[0])
		return;
	int linger = 0, high = 4096;
	l->steps = zmq_socket(l->zmq, ZMQ_SUB);
	int64_t cap = MESSAGE_CAP_BYTES;
	zmq_setsockopt(l->steps, ZMQ_LINGER, &linger, sizeof linger);
	zmq_setsockopt(l->steps, ZMQ_RCVHWM, &high, sizeof high);
	zmq_setsockopt(l->steps, ZMQ_MAXMSGSIZE, &cap, sizeof cap);
	zmq_setsockopt(l->steps, ZMQ_SUBSCRIBE, "", 0);
	struct error e;
	if (l->options.keys && worker_keys_apply(l->options.keys, l->steps, &e) != STATUS_OK) {
		mark_broken(l, &e);
	} else if (zmq_connect(l->steps, endpoint)) {
		error_set(&e, STATUS_UNAVAILABLE, "step channel %s: %s", endpoint, zmq_strerror(errno));
		mark_broken(l, &e);
	}
}

static void flush_out(struct worker_link *l)
{
	for (;;) {
		pthread_mutex_lock(&l->lock);
		bool any = l->out_count > 0;
		struct packet p = l->out[l->out_head];
		pthread_mutex_unlock(&l->lock);
		if (!any)
			return;
		if (zmq_send(l->control, p.data, p.len, ZMQ_DONTWAIT) < 0) {
			if (errno == EAGAIN)
				return; // tried again at the next turn
			log_error("sending: %s", zmq_strerror(errno));
		}
		free(p.data);
		pthread_mutex_lock(&l->lock);
		l->out_head = (l->out_head + 1) % OUT_QUEUE;
		l->out_count--;
		pthread_mutex_unlock(&l->lock);
	}
}

// Receives all that is there; a message is one part.
static void receive_all(struct worker_link *l, void *socket, void (*take)(struct worker_link *, const void *, size_t))
{
	zmq_msg_t m;
	zmq_msg_init(&m);
	while (zmq_msg_recv(&m, socket, ZMQ_DONTWAIT) >= 0) {
		if (zmq_msg_more(&m))
			continue; // ours have one part; the last one is judged
		take(l, zmq_msg_data(&m), zmq_msg_size(&m));
	}
	zmq_msg_close(&m);
}

static void take_monitor(struct worker_link *l)
{
	zmq_msg_t m;
	zmq_msg_init(&m);
	while (zmq_msg_recv(&m, l->monitor, ZMQ_DONTWAIT) >= 0) {
		if (zmq_msg_more(&m) && zmq_msg_size(&m) >= 2) {
			uint16_t event;
			memcpy(&event, zmq_msg_data(&m), sizeof event);
			if (event == ZMQ_EVENT_DISCONNECTED && !l->lost_since_ms) {
				l->lost_since_ms = now_ms();
			} else if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED && !l->was_reached) {
				l->was_reached = true;
				l->lost_since_ms = 0;
			} else if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED && l->lost_since_ms) {
				l->lost_since_ms = 0;
				l->heard_ms = now_ms();
				interrupt_compute(l);
				pthread_mutex_lock(&l->lock);
				l->back = true;
				pthread_cond_signal(&l->arrived);
				pthread_mutex_unlock(&l->lock);
			}
		}
	}
	zmq_msg_close(&m);
}

static void watch_coordinator(struct worker_link *l)
{
	uint64_t now = now_ms();
	bool lost = l->lost_since_ms && now - l->lost_since_ms > l->options.gone_after_ms;
	lost |= !l->was_reached && l->options.first_after_ms && now - l->begin_ms > l->options.first_after_ms;
	bool silent = l->coordinator_beats && now - l->heard_ms > l->options.gone_after_ms + SILENT_EXTRA_MS;
	if (!lost && !silent)
		return;
	if (!l->gone_ms) {
		l->gone_ms = now;
		pthread_mutex_lock(&l->lock);
		l->gone = true;
		pthread_cond_signal(&l->arrived);
		pthread_mutex_unlock(&l->lock);
		interrupt_compute(l);
	} else if (now - l->gone_ms > END_AFTER_MS) {
		log_error("the coordinator is gone: ending in the middle of a step");
		_exit(STATUS_FATAL);
	}
}

static void *run(void *arg)
{
	struct worker_link *l = arg;
	uint64_t next_beat = 0, next_sign = 0;
	for (;;) {
		pthread_mutex_lock(&l->lock);
		bool closing = l->closing, beating = l->beating;
		pthread_mutex_unlock(&l->lock);
		resubscribe(l);
		flush_out(l);
		if (closing)
			return NULL;
		uint64_t now = now_ms();
		if (now >= next_beat) {
			if (beating)
				send_heartbeat(l);
			next_beat = now + HEARTBEAT_MS;
		}
		if (l->options.watch_fd >= 0 && now >= next_sign) {
			ssize_t n = write(l->options.watch_fd, "", 1);
			(void)n; // a full pipe is read later, a closed one means that the launcher is gone, which kills us
			next_sign = now + WATCH_MS;
		}
		watch_coordinator(l);
		uint64_t next = l->options.watch_fd >= 0 && next_sign < next_beat ? next_sign : next_beat;
		now = now_ms();
		zmq_pollitem_t items[] = {
			{.fd = l->wake_fd, .events = ZMQ_POLLIN},
			{.socket = l->control, .events = ZMQ_POLLIN},
			{.socket = l->monitor, .events = ZMQ_POLLIN},
			{.socket = l->steps, .events = ZMQ_POLLIN},
		};
		if (zmq_poll(items, l->steps ? 4 : 3, next > now ? (long)(next - now) : 0) < 0 && errno != EINTR) {
			log_error("polling: %s", zmq_strerror(errno));
			_exit(STATUS_FATAL);
		}
		if (items[0].revents) {
			uint64_t count;
			ssize_t n = read(l->wake_fd, &count, sizeof count);
			(void)n;
		}
		if (items[3].revents && l->steps)
			receive_all(l, l->steps, take_step);
		if (items[1].revents)
			receive_all(l, l->control, take_control);
		if (items[2].revents)
			take_monitor(l);
	}
}

enum status worker_link_create(struct worker_link **out, const struct worker_link_options *o, struct error *e)
{
	enum status status = STATUS_OK;
	struct worker_link *l = xcalloc(1, sizeof *l);
	*out = NULL;
	l->options = *o;
	l->begin_ms = now_ms();
	l->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	pthread_mutex_init(&l->lock, NULL);
	pthread_condattr_t attr;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&l->arrived, &attr);
	pthread_condattr_destroy(&attr);
	l->zmq = zmq_ctx_new();
	l->control = zmq_socket(l->zmq, ZMQ_DEALER);
	l->monitor = zmq_socket(l->zmq, ZMQ_PAIR);
	int linger = 500, high = 4096, interval = 50;
	int64_t cap = MESSAGE_CAP_BYTES;
	zmq_setsockopt(l->control, ZMQ_LINGER, &linger, sizeof linger);
	zmq_setsockopt(l->control, ZMQ_SNDHWM, &high, sizeof high);
	zmq_setsockopt(l->control, ZMQ_RCVHWM, &high, sizeof high);
	zmq_setsockopt(l->control, ZMQ_RECONNECT_IVL, &interval, sizeof interval);
	zmq_setsockopt(l->control, ZMQ_MAXMSGSIZE, &cap, sizeof cap);
	zmq_socket_monitor(l->control, "inproc://monitor", ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
	zmq_connect(l->monitor, "inproc://monitor");
	if (o->keys) {
		l->keys = *o->keys;
		l->options.keys = &l->keys;
		status = worker_keys_apply(&l->keys, l->control, e);
	}
	if (status != STATUS_OK)
		; // said
	else if (zmq_connect(l->control, o->endpoint))
		status = error_set(e, STATUS_UNAVAILABLE, "control channel %s: %s", o->endpoint, zmq_strerror(errno));
	else if (pthread_create(&l->thread, NULL, run, l))
		status = error_set(e, STATUS_UNAVAILABLE, "no thread for the link: %s", strerror(errno));
	if (status == STATUS_OK) {
		*out = l;
		return STATUS_OK;
	}
	l->closing = true;
	zmq_close(l->monitor);
	zmq_close(l->control);
	zmq_ctx_term(l->zmq);
	close(l->wake_fd);
	free(l);
	return status;
}

void worker_link_destroy(struct worker_link **link)
{
	struct worker_link *l = *link;
	if (!l)
		return;
	pthread_mutex_lock(&l->lock);
	l->closing = true;
	pthread_mutex_unlock(&l->lock);
	wake(l);
	pthread_join(l->thread, NULL);
	if (l->steps)
		zmq_close(l->steps);
	zmq_close(l->monitor);
	zmq_close(l->control);
	zmq_ctx_term(l->zmq);
	drop_steps(l);
	while (l->in_count > 0) {
		message_free(&l->in[l->in_head]);
		l->in_head = (l->in_head + 1) % CONTROL_QUEUE;
		l->in_count--;
	}
	while (l->out_count > 0) {
		free(l->out[l->out_head].data);
		l->out_head = (l->out_head + 1) % OUT_QUEUE;
		l->out_count--;
	}
	close(l->wake_fd);
	pthread_cond_destroy(&l->arrived);
	pthread_mutex_destroy(&l->lock);
	free(l->buffer);
	free(l);
	*link = NULL;
}

enum status worker_link_send(struct worker_link *l, const struct message *m, struct error *e)
{
	uint8_t *data = NULL;
	size_t len = 0, capacity = 0;
	enum status status = message_encode(m, &data, &len, &capacity, e);
	if (status != STATUS_OK) {
		free(data);
		return status;
	}
	pthread_mutex_lock(&l->lock);
	if (l->out_count == OUT_QUEUE) {
		status = error_set(e, STATUS_BUSY, "%d messages wait for the coordinator", OUT_QUEUE);
		free(data);
	} else {
		l->out[(l->out_head + l->out_count++) % OUT_QUEUE] = (struct packet){data, len};
		l->beating = true;
	}
	pthread_mutex_unlock(&l->lock);
	wake(l);
	return status;
}

void worker_link_subscribe(struct worker_link *l, const char *endpoint, uint32_t epoch,
                           const struct message_limits *limits)
{
	pthread_mutex_lock(&l->lock);
	drop_steps(l);
	l->broken = false;
	memset(l->endpoint, 0, sizeof l->endpoint);
	memcpy(l->endpoint, endpoint, strnlen(endpoint, sizeof l->endpoint - 1));
	l->epoch = l->taken_epoch = epoch;
	l->limits = *limits;
	l->resubscribe = true;
	pthread_mutex_unlock(&l->lock);
	wake(l);
}

void worker_link_unsubscribe(struct worker_link *l)
{
	pthread_mutex_lock(&l->lock);
	drop_steps(l);
	l->broken = false;
	l->endpoint[0] = 0;
	l->taken_epoch = 0;
	l->resubscribe = true;
	pthread_mutex_unlock(&l->lock);
	wake(l);
}

bool worker_link_control_waits(struct worker_link *l)
{
	pthread_mutex_lock(&l->lock);
	bool waits = l->in_count > 0 || l->gone || l->back;
	pthread_mutex_unlock(&l->lock);
	return waits;
}

enum worker_link_event worker_link_wait(struct worker_link *l, unsigned timeout_ms, struct message *out, struct error *e)
{
	uint64_t deadline = now_ms() + timeout_ms;
	struct timespec until = {.tv_sec = (time_t)(deadline / 1000), .tv_nsec = (long)(deadline % 1000) * 1000000};
	enum worker_link_event event = LINK_NONE;
	pthread_mutex_lock(&l->lock);
	for (;;) {
		if (l->gone) {
			event = LINK_GONE;
		} else if (l->back) {
			l->back = false;
			event = LINK_BACK;
		} else if (l->in_count > 0) {
			*out = l->in[l->in_head];
			l->in_head = (l->in_head + 1) % CONTROL_QUEUE;
			l->in_count--;
			event = LINK_CONTROL;
		} else if (l->broken) {
			error_set(e, STATUS_INVALID, "%s", l->why.text);
			event = LINK_BROKEN;
		} else if (l->step_count > 0) {
			*out = l->step[l->step_head];
			l->step_head = (l->step_head + 1) % LINK_QUEUE_STEPS;
			l->step_count--;
			event = LINK_STEP;
		}
		if (event != LINK_NONE || pthread_cond_timedwait(&l->arrived, &l->lock, &until) == ETIMEDOUT)
			break;
	}
	pthread_mutex_unlock(&l->lock);
	return event;
}

const struct message *worker_link_peek_step(struct worker_link *l)
{
	pthread_mutex_lock(&l->lock);
	const struct message *m = l->step_count > 0 ? &l->step[l->step_head] : NULL;
	pthread_mutex_unlock(&l->lock);
	return m;
}
