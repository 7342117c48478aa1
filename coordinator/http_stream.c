// The stream thread: takes the engine's tokens, turns them into text, writes streams and watches for clients that are
// gone or slow. The surprising decision: it has one inbox for all requests and one scratch buffer, and writes a
// stream's chunk straight from there to the socket; a request owns memory for output only while its client does not
// take it.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "common/log.h"
#include "coordinator/http_internal.h"

enum { MAX_READY_FDS = 256, TICK_MS = 1000 };

void http_note_post(struct http_server *s, const struct http_note *note)
{
	pthread_mutex_lock(&s->note_lock);
	bool wake = s->n_notes == 0;
	if (s->n_notes == s->notes_capacity) {
		s->notes_capacity = s->notes_capacity ? s->notes_capacity * 2 : 64;
		s->notes = xrealloc(s->notes, s->notes_capacity * sizeof *s->notes);
	}
	s->notes[s->n_notes++] = *note;
	pthread_mutex_unlock(&s->note_lock);
	if (wake)
		(void)!write(s->wake_fd, &(uint64_t){1}, 8);
}

void http_on_events(void *user, const struct scheduler_event *events, uint32_t count)
{
	struct http_sub *sub = user;
	struct http_server *s = sub->request->server;
	for (uint32_t i = 0; i < count; i++)
		http_note_post(s, &(struct http_note){
				      .kind = NOTE_EVENT, .request = sub->request, .sub = sub, .event = events[i]});
}

// ---- libmicrohttpd's side of a stream

// Ends the connection without the last chunk: libmicrohttpd finds that it cannot send that one, and cleans up at once.
// MHD_CONTENT_READER_END_WITH_ERROR would leave the socket open until the next event of another connection (0.9.75).
static void close_instead(struct http_request *r)
{
	int fd = MHD_get_connection_info(r->connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
	if (r->end == STREAM_BROKEN) // what lies in the kernel is thrown away too
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){.l_onoff = 1}, sizeof(struct linger));
	shutdown(fd, SHUT_WR);
}

ssize_t http_stream_read(void *user, uint64_t pos, char *buf, size_t max)
{
	struct http_request *r = user;
	ssize_t result = 0;
	bool first = false;
	pthread_mutex_lock(&r->lock);
	if (r->server->tls && r->out.len > r->out_pos && r->end != STREAM_BROKEN) {
		size_t n = r->out.len - r->out_pos < max ? r->out.len - r->out_pos : max;
		memcpy(buf, r->out.data + r->out_pos, n);
		r->out_pos += n;
		if (r->out_pos == r->out.len)
			r->out_pos = r->out.len = 0;
		result = (ssize_t)n;
	} else if (r->end == STREAM_ENDED) {
		result = MHD_CONTENT_READER_END_OF_STREAM;
	} else if (r->end != STREAM_RUNNING) {
		close_instead(r);
		result = MHD_CONTENT_READER_END_OF_STREAM;
	} else {
		r->suspended = true;
		MHD_suspend_connection(r->connection);
		first = !r->attached;
		r->attached = true;
	}
	pthread_mutex_unlock(&r->lock);
	if (first) {
		http_request_ref(r);
		http_note_post(r->server, &(struct http_note){.kind = NOTE_READY, .request = r});
	}
	return result;
}

static void release_response(void *user)
{
	http_request_unref(user);
}

enum MHD_Result http_stream_queue(struct http_request *r, struct MHD_Response **out)
{
	// Without TLS nothing goes through libmicrohttpd's buffer.
	*out = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, r->server->tls ? 4096 : 64, http_stream_read, r,
						 release_response);
	if (!*out)
		return MHD_NO;
	http_request_ref(r);
	return MHD_YES;
}

// ---- writing

static void watch(struct http_request *r, bool want_write)
{
	struct epoll_event ev = {.events = EPOLLRDHUP | (want_write ? EPOLLOUT : 0), .data.ptr = r};
	if (r->watched) {
		if (want_write != r->want_write)
			epoll_ctl(r->server->epoll_fd, EPOLL_CTL_MOD, r->fd, &ev);
	} else {
		http_request_ref(r);
		r->watched = epoll_ctl(r->server->epoll_fd, EPOLL_CTL_ADD, r->fd, &ev) == 0;
		if (!r->watched)
			http_request_unref(r);
	}
	r->want_write = want_write;
}

static void list_remove(struct http_request *r)
{
	if (r->prev)
		r->prev->next = r->next;
	else if (r->server->active == r)
		r->server->active = r->next;
	if (r->next)
		r->next->prev = r->prev;
	r->prev = r->next = NULL;
}

// Cancels what the engine still computes for r.
static void cancel_subs(struct http_request *r)
{
	for (uint32_t i = 0; i < r->n_subs; i++)
		if (r->subs[i].submitted && r->subs[i].n_ended < r->subs[i].n_choices)
			engine_cancel(r->server->options.engine, r->subs[i].engine_id);
}

// r ends here: libmicrohttpd's thread gets it back, to finish or to close its connection.
static void conclude(struct http_request *r, enum metrics_outcome outcome, enum http_stream_end end)
{
	struct http_server *s = r->server;
	r->done = true;
	cancel_subs(r);
	metrics_ended(s->metrics, outcome);
	metrics_observe(s->metrics, METRICS_END_TO_END, (double)(http_now_us() - r->arrival_us) * 1e-6, 1);
	list_remove(r);
	if (r->watched)
		epoll_ctl(s->epoll_fd, EPOLL_CTL_DEL, r->fd, NULL);
	if (r->fd >= 0)
		close(r->fd);
	r->fd = -1;
	if (r->api.flag.stream) {
		pthread_mutex_lock(&r->lock);
		r->end = end;
		if (r->suspended) {
			r->suspended = false;
			MHD_resume_connection(r->connection);
		}
		pthread_mutex_unlock(&r->lock);
	} else {
		if (end == STREAM_BROKEN && r->answer_kind == ANSWER_NONE)
			r->answer_kind = ANSWER_CLOSE;
		http_hand_back(r);
	}
	http_busy(s, -1, 0);
	if (r->watched) { // last, since this may be the last reference
		r->watched = false;
		http_request_unref(r);
	}
}

static void client_gone(struct http_request *r)
{
	if (!r->done)
		conclude(r, OUTCOME_CANCELLED, STREAM_BROKEN);
}

static void drop_slow(struct http_request *r)
{
	log_info("request %s: dropped, its client took nothing for %lld s or left more than %d bytes", r->request_id,
		 (long long)(r->server->slow_ms / 1000), HTTP_PENDING_MAX);
	if (r->server->tls) // libmicrohttpd may be waiting until it can send
		shutdown(r->fd, SHUT_RDWR);
	conclude(r, OUTCOME_FAILED_SLOW_CLIENT, STREAM_BROKEN);
}

static enum metrics_outcome outcome_of(const struct http_request *r)
{
	return r->answer.choices[0].finish == FINISH_LENGTH ? OUTCOME_LENGTH : OUTCOME_STOP;
}

// All was written and taken (or lies with libmicrohttpd, under TLS).
static void conclude_if_drained(struct http_request *r)
{
	if (r->ending && (r->server->tls || r->out.len == r->out_pos)) {
		if (r->failed)
			conclude(r, OUTCOME_FAILED_ENGINE, STREAM_FAILED);
		else
			conclude(r, outcome_of(r), STREAM_ENDED);
	}
}

static void flush_pending(struct http_request *r)
{
	while (r->out_pos < r->out.len) {
		ssize_t n = send(r->fd, r->out.data + r->out_pos, r->out.len - r->out_pos, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
			watch(r, true);
			return;
		}
		if (n < 0) {
			client_gone(r);
			return;
		}
		r->out_pos += (size_t)n;
	}
	json_buf_free(&r->out); // it was blocked, which is rare: give the memory back
	r->out_pos = 0;
	r->blocked_since_ms = 0;
	watch(r, false);
	conclude_if_drained(r);
}

static void keep_rest(struct http_request *r, const struct iovec *iov, unsigned count, size_t sent)
{
	for (unsigned i = 0; i < count; i++) {
		size_t skip = sent < iov[i].iov_len ? sent : iov[i].iov_len;
		json_add(&r->out, (const char *)iov[i].iov_base + skip, iov[i].iov_len - skip);
		sent -= skip;
	}
}

// Sends one piece of the stream to the client, at once if it takes it. May conclude r.
static void emit(struct http_request *r, const struct json_buf *piece, int64_t now_ms)
{
	r->last_write_ms = now_ms;
	if (r->server->tls) {
		pthread_mutex_lock(&r->lock);
		json_add(&r->out, piece->data, piece->len);
		size_t pending = r->out.len - r->out_pos;
		if (r->suspended) {
			r->suspended = false;
			MHD_resume_connection(r->connection);
		}
		pthread_mutex_unlock(&r->lock);
		if (pending > HTTP_PENDING_MAX)
			drop_slow(r);
		return;
	}
	char size[24];
	int size_len = r->chunked ? snprintf(size, sizeof size, "%zx\r\n", piece->len) : 0;
	struct iovec iov[3] = {{size, (size_t)size_len}, {piece->data, piece->len}, {"\r\n", r->chunked ? 2 : 0}};
	size_t total = iov[0].iov_len + iov[1].iov_len + iov[2].iov_len;
	ssize_t n = 0;
	if (r->out.len == r->out_pos) {
		struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 3};
		do
			n = sendmsg(r->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
		while (n < 0 && errno == EINTR);
		if ((size_t)n == total)
			return;
		if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
			client_gone(r);
			return;
		}
		n = n < 0 ? 0 : n;
		r->blocked_since_ms = now_ms;
		watch(r, true);
	}
	keep_rest(r, iov, 3, (size_t)n);
	if (r->out.len - r->out_pos > HTTP_PENDING_MAX)
		drop_slow(r);
}

// ---- what the engine said

static void fail(struct http_request *r, struct json_buf *scratch, int64_t now_ms)
{
	r->failed = true;
	if (!r->api.flag.stream) {
		http_answer_error(r);
		conclude(r, OUTCOME_FAILED_ENGINE, STREAM_BROKEN);
		return;
	}
	scratch->len = 0;
	json_adds(scratch, "data: ");
	api_error_write(&r->error, scratch);
	json_adds(scratch, "\n\n");
	r->ending = true;
	emit(r, scratch, now_ms);
	if (!r->done)
		conclude_if_drained(r);
}

// Gives out what came since the last time, in one write.
static void give_out(struct http_request *r, struct json_buf *scratch, int64_t now_ms)
{
	if (r->failed) {
		if (!r->ending)
			fail(r, scratch, now_ms);
		return;
	}
	if (r->api.flag.stream) {
		scratch->len = 0;
		if (!r->answer.started && r->n_touched)
			api_answer_first_chunks(&r->answer, scratch);
		for (uint32_t i = 0; i < r->n_touched; i++) {
			api_answer_chunk(&r->answer, r->touched[i], scratch);
			r->is_touched[r->touched[i]] = false;
		}
		r->n_touched = 0;
		if (!r->n_unfinished) {
			api_answer_end_chunks(&r->answer, scratch);
			r->ending = true;
		}
		if (scratch->len)
			emit(r, scratch, now_ms);
		if (!r->done)
			conclude_if_drained(r);
	} else if (!r->n_unfinished) {
		api_answer_whole(&r->answer, &r->answer_body);
		r->answer_kind = ANSWER_WHOLE;
		r->http_status = 200;
		conclude(r, outcome_of(r), STREAM_ENDED);
	}
}

static void observe_token(struct http_request *r, uint32_t choice, int64_t now_us)
{
	struct metrics *m = r->server->metrics;
	if (!r->got_token) {
		r->got_token = true;
		metrics_observe(m, METRICS_FIRST_TOKEN, (double)(now_us - r->arrival_us) * 1e-6, 1);
	}
	if (r->last_token_us[choice])
		metrics_observe(m, METRICS_INTER_TOKEN, (double)(now_us - r->last_token_us[choice]) * 1e-6, 1);
	r->last_token_us[choice] = now_us;
}

static void apply_event(struct http_request *r, struct http_sub *sub, const struct scheduler_event *ev, int64_t now_us)
{
	uint32_t choice = sub->first_choice + ev->choice;
	if (r->done || r->failed || r->answer.choices[choice].finish != FINISH_NONE)
		return;
	if (ev->finish == FINISH_FAILED || ev->finish == FINISH_CANCELLED) {
		api_error_set(&r->error, 503, "engine_error", "%s",
			      ev->finish == FINISH_FAILED ? "the pipeline failed while it computed this answer"
							  : "the server is ending");
		r->failed = true;
		return;
	}
	if (ev->has_token) {
		struct api_prompt_tokens *prompt = &r->answer.prompts[sub - r->subs];
		if (!r->last_token_us[choice] && !prompt->n_cached)
			prompt->n_cached = ev->n_cached;
		observe_token(r, choice, now_us);
	}
	if (api_answer_push(&r->answer, choice, ev, ev->has_token && ev->finish == FINISH_STOP))
		engine_stop_choice(r->server->options.engine, sub->engine_id, ev->choice);
	if (r->answer.choices[choice].finish != FINISH_NONE)
		r->n_unfinished--;
	if (!r->is_touched[choice]) {
		r->is_touched[choice] = true;
		r->touched[r->n_touched++] = choice;
	}
}

static void get_ready(struct http_request *r, int64_t now_ms)
{
	struct http_server *s = r->server;
	r->ready = true;
	r->last_write_ms = now_ms;
	r->next = s->active;
	r->prev = NULL;
	if (r->next)
		r->next->prev = r;
	s->active = r;
	if (r->fd >= 0) {
		if (r->api.flag.stream)
			setsockopt(r->fd, SOL_SOCKET, SO_SNDBUF, &(int){HTTP_SEND_BUFFER}, sizeof(int));
		watch(r, false);
	}
}

// ---- the loop

struct stream_state {
	struct http_note *notes; // taken from the server's inbox
	size_t n_notes, notes_capacity;
	struct http_request **dirty;
	size_t n_dirty, dirty_capacity;
	struct json_buf scratch;
};

static void mark_dirty(struct stream_state *st, struct http_request *r)
{
	if (r->dirty)
		return;
	if (st->n_dirty == st->dirty_capacity) {
		st->dirty_capacity = st->dirty_capacity ? st->dirty_capacity * 2 : 64;
		st->dirty = xrealloc(st->dirty, st->dirty_capacity * sizeof(struct http_request *));
	}
	http_request_ref(r);
	r->dirty = true;
	st->dirty[st->n_dirty++] = r;
}

static void take_notes(struct http_server *s, struct stream_state *st)
{
	pthread_mutex_lock(&s->note_lock);
	struct http_note *notes = s->notes;
	size_t n = s->n_notes, capacity = s->notes_capacity;
	s->notes = st->notes;
	s->notes_capacity = st->notes_capacity;
	s->n_notes = 0;
	pthread_mutex_unlock(&s->note_lock);
	st->notes = notes;
	st->n_notes = n;
	st->notes_capacity = capacity;
}

static void process_event(struct stream_state *st, const struct http_note *note, int64_t now_us)
{
	struct http_request *r = note->request;
	apply_event(r, note->sub, &note->event, now_us);
	mark_dirty(st, r);
	if (note->event.finish != FINISH_NONE && ++note->sub->n_ended == note->sub->n_choices) {
		http_busy(r->server, 0, -1);
		http_request_unref(r); // the engine's
	}
}

static void stop_request(struct http_request *r)
{
	if (r->failed || r->ending)
		return;
	api_error_set(&r->error, 503, "server_ending", "the server is ending");
	r->failed = true;
}

static void process_note(struct http_server *s, struct stream_state *st, const struct http_note *note, int64_t now_us)
{
	struct http_request *r = note->request;
	switch (note->kind) {
	case NOTE_EVENT:
		process_event(st, note, now_us);
		return;
	case NOTE_READY:
		if (!r->done) {
			if (s->stopped)
				stop_request(r);
			get_ready(r, now_us / 1000);
			mark_dirty(st, r);
		}
		break;
	case NOTE_ABORT: // a later prompt of r was refused: its error is the answer
		r->done = true;
		cancel_subs(r);
		if (r->fd >= 0)
			close(r->fd);
		r->fd = -1;
		http_hand_back(r);
		http_busy(s, -1, 0);
		break;
	case NOTE_GONE:
		client_gone(r);
		break;
	case NOTE_STOP:
		s->stopped = true;
		for (struct http_request *a = s->active; a; a = a->next) {
			stop_request(a);
			mark_dirty(st, a);
		}
		return;
	}
	http_request_unref(r);
}

static void process_dirty(struct stream_state *st, int64_t now_ms)
{
	for (size_t i = 0; i < st->n_dirty; i++) {
		struct http_request *r = st->dirty[i];
		r->dirty = false;
		if (r->ready && !r->done && !r->ending)
			give_out(r, &st->scratch, now_ms);
		http_request_unref(r);
	}
	st->n_dirty = 0;
	if (st->scratch.capacity > (1 << 20))
		json_buf_free(&st->scratch);
}

static void watch_slow_stream(struct http_request *r, struct json_buf *scratch, int64_t now_ms)
{
	if (r->server->tls) {
		pthread_mutex_lock(&r->lock);
		bool pending = r->out.len > r->out_pos;
		pthread_mutex_unlock(&r->lock);
		if (!pending)
			r->blocked_since_ms = 0;
		else if (!r->blocked_since_ms)
			r->blocked_since_ms = now_ms;
	}
	if (r->blocked_since_ms && now_ms - r->blocked_since_ms > r->server->slow_ms) {
		drop_slow(r);
	} else if (!r->blocked_since_ms && now_ms - r->last_write_ms > HTTP_PING_MS) {
		scratch->len = 0;
		json_adds(scratch, ": ping\n\n");
		emit(r, scratch, now_ms);
	}
}

static void tick(struct http_server *s, struct json_buf *scratch, int64_t now_ms)
{
	for (struct http_request *r = s->active, *next; r; r = next) {
		next = r->next;
		http_request_ref(r);
		if (r->api.flag.stream)
			watch_slow_stream(r, scratch, now_ms);
		http_request_unref(r);
	}
	pthread_mutex_lock(&s->conn_lock);
	for (struct http_conn *c = s->conns; c; c = c->next) {
		if (c->deadline_ms && now_ms > c->deadline_ms) {
			c->deadline_ms = 0;
			shutdown(c->fd, SHUT_RDWR);
		}
	}
	pthread_mutex_unlock(&s->conn_lock);
}

static void process_fd(struct epoll_event *ev)
{
	struct http_request *r = ev->data.ptr;
	if (ev->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		client_gone(r);
	else if (!r->done && !r->server->tls)
		flush_pending(r);
}

void *http_stream_thread(void *server)
{
	struct http_server *s = server;
	struct stream_state st = {0};
	struct epoll_event fds[MAX_READY_FDS];
	int64_t next_tick_ms = 0;
	for (bool stop = false; !stop;) {
		int n = epoll_wait(s->epoll_fd, fds, MAX_READY_FDS, TICK_MS);
		for (int i = 0; i < n; i++) {
			if (fds[i].data.ptr)
				process_fd(&fds[i]);
			else
				(void)!read(s->wake_fd, &(uint64_t){0}, 8);
		}
		take_notes(s, &st);
		int64_t now_us = http_now_us(), now_ms = now_us / 1000;
		for (size_t i = 0; i < st.n_notes; i++)
			process_note(s, &st, &st.notes[i], now_us);
		process_dirty(&st, now_ms);
		if (now_ms >= next_tick_ms) {
			tick(s, &st.scratch, now_ms);
			next_tick_ms = now_ms + TICK_MS;
		}
		pthread_mutex_lock(&s->note_lock);
		stop = s->stream_stop && !s->n_notes;
		pthread_mutex_unlock(&s->note_lock);
	}
	free(st.notes);
	free(st.dirty);
	json_buf_free(&st.scratch);
	return NULL;
}
