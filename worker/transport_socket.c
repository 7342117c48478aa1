// Edges over stream sockets: Unix sockets in a folder of mode 0700, or TCP on loopback. The surprising decision: a frame
// that fits the kernel's socket buffer is "received ahead" by the kernel, so the computing thread reads it itself and no
// thread is woken on the way of a token; only frames larger than AHEAD_BYTES (prefill) are read by a helper thread while
// the caller computes.
//
// A core that has gone to sleep takes 40 microseconds to answer (virtual machine, Xeon with AVX-512 BF16: a hop took 30
// microseconds after 50 of waiting, 72 after 4,000). Decoding waits are regular, so where spinning is allowed a waiter
// sleeps until shortly before data is due, by the mean and spread of its last waits, and then looks without sleeping.
//
// Abort is shutdown(2), which wakes a blocked read or write in any thread and leaves the descriptor valid.
#define _GNU_SOURCE
#include "worker/transport.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
	FRAME_MAGIC = 0x46435453,      // "STCF"
	HANDSHAKE_MAGIC = 0x48435453,  // "STCH"
	AHEAD_BYTES = 64 << 10,
	POSTED_MAX = 1024,             // receives posted and not waited for
	STASH_MAX = 16,                // peers that came for another epoch or kind
	BUFFER_BYTES = 4 << 20,        // asked of the kernel, which may give less
	SPIN_MIN_NS = 100000,          // half of the time that is spun, at least and at most
	SPIN_MAX_NS = 800000,
};

struct handshake { uint32_t magic, epoch, kind, zero; };

struct posted {
	uint64_t step;
	void *buffer;
	size_t bytes, done;            // done counts header and payload; the reader's
	bool complete;                 // set under the lock
	struct frame_header header;
};

struct edge {
	int fd;
	uint32_t epoch;
	enum frame_kind kind;
	atomic_bool aborted;
	// Posted receives, a ring; the oldest is read by whoever holds `reading`.
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct posted *posted;         // [POSTED_MAX]
	unsigned head, count;
	bool reading, closing, waiting; // waiting: the owner is in wait_receive and reads for itself
	enum status failure;
	char failure_text[160];
	bool has_helper;
	pthread_t helper;
	bool may_spin;
	int64_t expected_ns, spread_ns; // of waits for small frames: mean, and mean distance from it
};

struct listener {
	int fd;
	char path[108];                // "" for TCP
	struct { int fd; struct handshake hello; } stash[STASH_MAX];
	int n_stash;
};

static uint64_t now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// "unix:PATH" or "tcp:127.x.y.z:PORT". Anything beyond loopback is refused by name.
static enum status parse_address(const char *address, struct sockaddr_storage *out, socklen_t *len, struct error *e)
{
	memset(out, 0, sizeof *out);
	if (!strncmp(address, "unix:", 5)) {
		struct sockaddr_un *a = (struct sockaddr_un *)out;
		if (strlen(address + 5) >= sizeof a->sun_path)
			return error_set(e, STATUS_UNAVAILABLE, "data address %s: a socket path holds %zu bytes", address,
			                 sizeof a->sun_path - 1);
		a->sun_family = AF_UNIX;
		memcpy(a->sun_path, address + 5, strlen(address + 5) + 1);
		*len = sizeof *a;
		return STATUS_OK;
	}
	if (!strncmp(address, "tcp:", 4)) {
		struct sockaddr_in *a = (struct sockaddr_in *)out;
		char host[64];
		unsigned port;
		char extra;
		if (sscanf(address + 4, "%63[^:]:%u%c", host, &port, &extra) != 2 || port > 65535 ||
		    inet_pton(AF_INET, host, &a->sin_addr) != 1)
			return error_set(e, STATUS_UNAVAILABLE, "data address %s: expected tcp:ADDRESS:PORT", address);
		if (ntohl(a->sin_addr.s_addr) >> 24 != 127)
			return error_set(e, STATUS_UNAVAILABLE,
			                 "data address %s is beyond loopback: the socket transport has no keys yet and refuses it",
			                 address);
		a->sin_family = AF_INET;
		a->sin_port = htons((uint16_t)port);
		*len = sizeof *a;
		return STATUS_OK;
	}
	return error_set(e, STATUS_UNAVAILABLE, "data address %s: expected unix:PATH or tcp:ADDRESS:PORT", address);
}

static bool socket_can_join(enum device_kind from, enum device_kind to, const char *address)
{
	return !strncmp(address, "unix:", 5) || !strncmp(address, "tcp:", 4);
}

static void tune(int fd, int family)
{
	int one = 1, bytes = BUFFER_BYTES;
	if (family == AF_INET)
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

// folder_or_address: a folder for a Unix socket, or "tcp:127.0.0.1:PORT" (0 = any).
static enum status socket_listen(void **out, const char *where, char *address, size_t address_size, struct error *e)
{
	enum status status = STATUS_OK;
	struct sockaddr_storage a;
	socklen_t len;
	struct listener *l = xcalloc(1, sizeof *l);
	l->fd = -1;
	*out = NULL;
	if (strncmp(where, "tcp:", 4)) {
		int n = snprintf(address, address_size, "unix:%s/data-%d-%llx", where, (int)getpid(),
		                 (unsigned long long)(uintptr_t)l & 0xffffff);
		if (n < 0 || (size_t)n >= address_size) {
			status = error_set(e, STATUS_UNAVAILABLE, "folder %s: its name is too long for a socket", where);
			goto out;
		}
	} else if ((size_t)snprintf(address, address_size, "%s", where) >= address_size) {
		status = error_set(e, STATUS_UNAVAILABLE, "data address %s is too long", where);
		goto out;
	}
	TRY_GOTO(parse_address(address, &a, &len, e), out);
	l->fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (a.ss_family == AF_UNIX) {
		memcpy(l->path, ((struct sockaddr_un *)&a)->sun_path, sizeof l->path); // parse_address() ended it
		unlink(l->path);
	}
	if (l->fd < 0 || bind(l->fd, (struct sockaddr *)&a, len) || listen(l->fd, 16)) {
		status = error_set(e, STATUS_UNAVAILABLE, "data address %s: %s", address, strerror(errno));
		goto out;
	}
	if (a.ss_family == AF_UNIX) {
		chmod(l->path, 0600);
	} else {
		struct sockaddr_in bound;
		len = sizeof bound;
		getsockname(l->fd, (struct sockaddr *)&bound, &len);
		char host[32];
		inet_ntop(AF_INET, &bound.sin_addr, host, sizeof host);
		snprintf(address, address_size, "tcp:%s:%u", host, ntohs(bound.sin_port));
	}
	tune(l->fd, a.ss_family);
out:
	if (status == STATUS_OK) {
		*out = l;
	} else {
		if (l->fd >= 0)
			close(l->fd);
		free(l);
	}
	return status;
}

static void socket_close_listener(void **listener)
{
	struct listener *l = *listener;
	if (!l)
		return;
	for (int i = 0; i < l->n_stash; i++)
		close(l->stash[i].fd);
	close(l->fd);
	if (l->path[0])
		unlink(l->path);
	free(l);
	*listener = NULL;
}

static struct edge *edge_create(int fd, uint32_t epoch, enum frame_kind kind)
{
	struct edge *edge = xcalloc(1, sizeof *edge);
	edge->fd = fd;
	edge->epoch = epoch;
	edge->kind = kind;
	edge->posted = xcalloc(POSTED_MAX, sizeof *edge->posted);
	pthread_mutex_init(&edge->lock, NULL);
	pthread_condattr_t attr;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&edge->changed, &attr);
	pthread_condattr_destroy(&attr);
	return edge;
}

// Waits until fd has one of `events`; false at the deadline.
static bool wait_fd(int fd, short events, uint64_t deadline_ms)
{
	for (;;) {
		uint64_t now = now_ms();
		struct pollfd p = {.fd = fd, .events = events};
		int n = poll(&p, 1, deadline_ms > now ? (int)(deadline_ms - now) : 0);
		if (n > 0)
			return true;
		if (n == 0 || errno != EINTR)
			return false;
	}
}

// Reads the handshake of a new peer. A peer that says nothing in half a second is dropped.
static bool read_handshake(int fd, struct handshake *h)
{
	size_t done = 0;
	uint64_t deadline = now_ms() + 500;
	while (done < sizeof *h) {
		ssize_t n = recv(fd, (char *)h + done, sizeof *h - done, MSG_DONTWAIT);
		if (n > 0) {
			done += (size_t)n;
			continue;
		}
		if (n == 0 || (errno != EAGAIN && errno != EINTR) || !wait_fd(fd, POLLIN, deadline))
			return false;
	}
	return h->magic == HANDSHAKE_MAGIC && h->zero == 0 && (h->kind == FRAME_HIDDEN || h->kind == FRAME_IDS);
}

static enum status socket_accept(void *listener, uint32_t epoch, enum frame_kind kind, unsigned timeout_ms,
                                 struct edge **out, struct error *e)
{
	struct listener *l = listener;
	uint64_t deadline = now_ms() + timeout_ms;
	*out = NULL;
	for (int i = 0; i < l->n_stash;) {
		int fd = l->stash[i].fd;
		struct handshake h = l->stash[i].hello;
		bool wanted = h.epoch == epoch && h.kind == (uint32_t)kind;
		if (!wanted && h.epoch >= epoch) {
			i++;
			continue;
		}
		l->stash[i] = l->stash[--l->n_stash];
		if (wanted) {
			*out = edge_create(fd, epoch, kind);
			return STATUS_OK;
		}
		close(fd); // an epoch that is over
	}
	for (;;) {
		int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC);
		if (fd < 0) {
			if (errno == EINTR || errno == ECONNABORTED)
				continue;
			if (errno != EAGAIN)
				return error_set(e, STATUS_UNAVAILABLE, "data socket: %s", strerror(errno));
			if (!wait_fd(l->fd, POLLIN, deadline))
				return error_set(e, STATUS_TIMEOUT, "no peer joined epoch %u within %u ms", epoch, timeout_ms);
			continue;
		}
		struct handshake h;
		if (!read_handshake(fd, &h) || h.epoch < epoch) {
			close(fd);
			continue;
		}
		tune(fd, l->path[0] ? AF_UNIX : AF_INET);
		if (h.epoch == epoch && h.kind == (uint32_t)kind) {
			*out = edge_create(fd, epoch, kind);
			return STATUS_OK;
		}
		if (l->n_stash == STASH_MAX) {
			close(fd);
			continue;
		}
		l->stash[l->n_stash].fd = fd;
		l->stash[l->n_stash++].hello = h;
	}
}

static enum status socket_connect(const char *address, uint32_t epoch, enum frame_kind kind, unsigned timeout_ms,
                                  struct edge **out, struct error *e)
{
	struct sockaddr_storage a;
	socklen_t len;
	*out = NULL;
	TRY(parse_address(address, &a, &len, e));
	uint64_t deadline = now_ms() + timeout_ms;
	for (;;) {
		int fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (fd < 0)
			return error_set(e, STATUS_UNAVAILABLE, "data address %s: %s", address, strerror(errno));
		tune(fd, a.ss_family);
		if (!connect(fd, (struct sockaddr *)&a, len)) {
			struct handshake h = {.magic = HANDSHAKE_MAGIC, .epoch = epoch, .kind = (uint32_t)kind};
			if (send(fd, &h, sizeof h, MSG_NOSIGNAL) == (ssize_t)sizeof h) {
				*out = edge_create(fd, epoch, kind);
				return STATUS_OK;
			}
		}
		int why = errno;
		close(fd);
		if (now_ms() >= deadline)
			return error_set(e, STATUS_TIMEOUT, "data address %s: %s", address, strerror(why));
		nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL); // the peer may not listen yet
	}
}

static void fail_locked(struct edge *edge, enum status status, const char *text)
{
	if (edge->failure == STATUS_OK) {
		edge->failure = status;
		snprintf(edge->failure_text, sizeof edge->failure_text, "%s", text);
	}
}

// The reader's, who does not hold the lock.
static enum status fail(struct edge *edge, enum status status, const char *text)
{
	pthread_mutex_lock(&edge->lock);
	fail_locked(edge, status, text);
	pthread_mutex_unlock(&edge->lock);
	return status;
}

static enum status check_header(struct edge *edge, const struct posted *p)
{
	const struct frame_header *h = &p->header;
	if (h->magic == FRAME_MAGIC && h->epoch == edge->epoch && h->kind == (uint32_t)edge->kind && h->step == p->step &&
	    h->bytes == p->bytes)
		return STATUS_OK;
	char text[160];
	snprintf(text, sizeof text, "a frame of epoch %u, kind %u, step %llu, %u bytes came where epoch %u, kind %u, step %llu, %zu bytes was due",
	         h->epoch, h->kind, (unsigned long long)h->step, h->bytes, edge->epoch, (unsigned)edge->kind,
	         (unsigned long long)p->step, p->bytes);
	return fail(edge, STATUS_INVALID, text);
}

// Reads what is there of `p` without waiting: OK when complete, ABSENT when more has to come. The caller has set
// `reading`, so that nobody else reads.
static enum status progress(struct edge *edge, struct posted *p)
{
	while (p->done < sizeof p->header + p->bytes) {
		struct iovec v[2];
		int n_v = 0;
		if (p->done < sizeof p->header) {
			v[n_v++] = (struct iovec){(char *)&p->header + p->done, sizeof p->header - p->done};
			if (p->bytes) // the payload is read in the same call; the header is checked right after
				v[n_v++] = (struct iovec){p->buffer, p->bytes};
		} else {
			size_t at = p->done - sizeof p->header;
			v[n_v++] = (struct iovec){(char *)p->buffer + at, p->bytes - at};
		}
		struct msghdr m = {.msg_iov = v, .msg_iovlen = (size_t)n_v};
		ssize_t n = recvmsg(edge->fd, &m, MSG_DONTWAIT);
		if (n > 0) {
			bool header_before = p->done >= sizeof p->header;
			p->done += (size_t)n;
			if (!header_before && p->done >= sizeof p->header)
				TRY(check_header(edge, p));
			continue;
		}
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			return STATUS_ABSENT;
		return fail(edge, STATUS_CLOSED, n == 0 ? "the peer closed its data connection" : strerror(errno));
	}
	return STATUS_OK;
}

// Waits for a small frame around the time when it is due, awake at the end. OK, ABSENT (it is late: wait asleep) or a
// failure. The caller has set `reading`.
static enum status progress_awake(struct edge *edge, struct posted *p)
{
	int64_t begin = now_ns(), half = 2 * edge->spread_ns + SPIN_MIN_NS;
	if (half > SPIN_MAX_NS)
		half = SPIN_MAX_NS;
	int64_t asleep = edge->expected_ns - half, end = begin + edge->expected_ns + half;
	enum status status = STATUS_ABSENT;
	if (asleep > 0) {
		struct pollfd f = {.fd = edge->fd, .events = POLLIN};
		ppoll(&f, 1, &(struct timespec){.tv_sec = asleep / 1000000000, .tv_nsec = asleep % 1000000000}, NULL);
	}
	do {
		status = progress(edge, p);
#ifdef __x86_64__
		for (int i = 0; status == STATUS_ABSENT && i < 20; i++)
			__builtin_ia32_pause();
#endif
	} while (status == STATUS_ABSENT && !edge->aborted && now_ns() < end);
	return status;
}

// A wait of `ns` for a small frame has ended.
static void learn_wait(struct edge *edge, int64_t ns)
{
	int64_t off = ns - edge->expected_ns, most = edge->expected_ns + 1000000; // one long wait says little about the next
	if (off > most)
		off = most;
	edge->expected_ns += off / 8;
	edge->spread_ns += ((off < 0 ? -off : off) - edge->spread_ns) / 8;
}

// The oldest posted receive that is not complete, or NULL.
static struct posted *next_incomplete(struct edge *edge)
{
	for (unsigned i = 0; i < edge->count; i++) {
		struct posted *p = &edge->posted[(edge->head + i) % POSTED_MAX];
		if (!p->complete)
			return p;
	}
	return NULL;
}

// Reads large frames while the owner computes.
static void *help(void *arg)
{
	struct edge *edge = arg;
	pthread_mutex_lock(&edge->lock);
	while (!edge->closing) {
		struct posted *p = edge->failure == STATUS_OK && !edge->waiting && !edge->reading ? next_incomplete(edge) : NULL;
		if (!p || p->bytes < AHEAD_BYTES) {
			pthread_cond_wait(&edge->changed, &edge->lock);
			continue;
		}
		edge->reading = true;
		pthread_mutex_unlock(&edge->lock);
		enum status s = progress(edge, p);
		if (s == STATUS_ABSENT) {
			struct pollfd f = {.fd = edge->fd, .events = POLLIN};
			poll(&f, 1, 1000);
		}
		pthread_mutex_lock(&edge->lock);
		edge->reading = false;
		p->complete = s == STATUS_OK;
		pthread_cond_broadcast(&edge->changed);
	}
	pthread_mutex_unlock(&edge->lock);
	return NULL;
}

static enum status socket_post_receive(struct edge *edge, uint64_t step, void *buffer, size_t bytes, struct error *e)
{
	enum status status = STATUS_OK;
	pthread_mutex_lock(&edge->lock);
	if (edge->count == POSTED_MAX) {
		status = error_set(e, STATUS_BUSY, "%d receives are posted", POSTED_MAX);
	} else {
		edge->posted[(edge->head + edge->count++) % POSTED_MAX] =
			(struct posted){.step = step, .buffer = buffer, .bytes = bytes};
		if (bytes >= AHEAD_BYTES) {
			if (!edge->has_helper)
				edge->has_helper = pthread_create(&edge->helper, NULL, help, edge) == 0;
			pthread_cond_broadcast(&edge->changed);
		}
	}
	pthread_mutex_unlock(&edge->lock);
	return status;
}

static enum status socket_wait_receive(struct edge *edge, unsigned timeout_ms, struct error *e)
{
	int64_t begin = now_ns();
	uint64_t deadline = now_ms() + timeout_ms;
	struct timespec until = {.tv_sec = (time_t)(deadline / 1000), .tv_nsec = (long)(deadline % 1000) * 1000000};
	enum status status;
	pthread_mutex_lock(&edge->lock);
	ASSERT(edge->count > 0);
	edge->waiting = true;
	struct posted *p = &edge->posted[edge->head];
	bool small = p->bytes < AHEAD_BYTES, awake = small && edge->may_spin;
	for (;;) {
		if (p->complete) {
			status = STATUS_OK;
			if (small)
				learn_wait(edge, now_ns() - begin);
			edge->head = (edge->head + 1) % POSTED_MAX;
			edge->count--;
			break;
		}
		if (edge->aborted)
			fail_locked(edge, STATUS_CLOSED, "the data connection was given up");
		if (edge->failure != STATUS_OK) {
			status = error_set(e, edge->failure, "%s", edge->failure_text);
			break;
		}
		if (edge->reading) { // the helper is at it; it lets go at the next bytes
			if (pthread_cond_timedwait(&edge->changed, &edge->lock, &until) == ETIMEDOUT) {
				status = error_set(e, STATUS_TIMEOUT, "no data for step %llu within %u ms",
				                   (unsigned long long)p->step, timeout_ms);
				break;
			}
			continue;
		}
		edge->reading = true;
		pthread_mutex_unlock(&edge->lock);
		bool in_time = true;
		enum status got = progress(edge, p);
		if (got == STATUS_ABSENT && awake) {
			got = progress_awake(edge, p);
			awake = false;
		}
		if (got == STATUS_ABSENT)
			in_time = wait_fd(edge->fd, POLLIN, deadline);
		pthread_mutex_lock(&edge->lock);
		edge->reading = false;
		p->complete = got == STATUS_OK;
		if (!in_time && !edge->aborted) {
			status = error_set(e, STATUS_TIMEOUT, "no data for step %llu within %u ms", (unsigned long long)p->step,
			                   timeout_ms);
			break;
		}
	}
	edge->waiting = false;
	if (edge->has_helper)
		pthread_cond_broadcast(&edge->changed);
	pthread_mutex_unlock(&edge->lock);
	return status;
}

static enum status socket_send(struct edge *edge, uint64_t step, const void *buffer, size_t bytes, struct error *e)
{
	struct frame_header h = {.magic = FRAME_MAGIC, .epoch = edge->epoch, .step = step, .kind = (uint32_t)edge->kind,
	                         .bytes = (uint32_t)bytes};
	ASSERT(bytes <= UINT32_MAX);
	size_t done = 0, total = sizeof h + bytes;
	while (done < total) {
		struct iovec v[2];
		int n_v = 0;
		if (done < sizeof h)
			v[n_v++] = (struct iovec){(char *)&h + done, sizeof h - done};
		size_t at = done > sizeof h ? done - sizeof h : 0;
		if (at < bytes)
			v[n_v++] = (struct iovec){(char *)(uintptr_t)buffer + at, bytes - at};
		struct msghdr m = {.msg_iov = v, .msg_iovlen = (size_t)n_v};
		ssize_t n = sendmsg(edge->fd, &m, MSG_NOSIGNAL);
		if (n > 0)
			done += (size_t)n;
		else if (n < 0 && errno != EINTR)
			return error_set(e, STATUS_CLOSED, "sending step %llu: %s", (unsigned long long)step,
			                 edge->aborted ? "the data connection was given up" : strerror(errno));
	}
	return STATUS_OK;
}

static void socket_set_spin(struct edge *edge, bool may_spin)
{
	edge->may_spin = may_spin;
}

static void socket_abort(struct edge *edge)
{
	edge->aborted = true;
	shutdown(edge->fd, SHUT_RDWR);
}

static void socket_close(struct edge **edge_ptr)
{
	struct edge *edge = *edge_ptr;
	if (!edge)
		return;
	socket_abort(edge);
	pthread_mutex_lock(&edge->lock);
	edge->closing = true;
	pthread_cond_broadcast(&edge->changed);
	pthread_mutex_unlock(&edge->lock);
	if (edge->has_helper)
		pthread_join(edge->helper, NULL);
	close(edge->fd);
	pthread_cond_destroy(&edge->changed);
	pthread_mutex_destroy(&edge->lock);
	free(edge->posted);
	free(edge);
	*edge_ptr = NULL;
}

const struct transport transport_socket = {
	.name = "socket",
	.can_join = socket_can_join,
	.listen = socket_listen,
	.close_listener = socket_close_listener,
	.accept = socket_accept,
	.connect = socket_connect,
	.post_receive = socket_post_receive,
	.wait_receive = socket_wait_receive,
	.set_spin = socket_set_spin,
	.send = socket_send,
	.abort = socket_abort,
	.close = socket_close,
};
