// What the files of the HTTP server share. http.c starts and stops it, http_route.c answers libmicrohttpd's callbacks,
// http_job.c runs on the API threads, http_stream.c on the stream thread. Who may touch a request: until it is handed
// to an API thread, libmicrohttpd's thread; then that API thread; from engine_submit() on the stream thread, which
// hands it back by resuming its connection. Its connection is suspended whenever it is not libmicrohttpd's.
#ifndef STAGECOACH_COORDINATOR_HTTP_INTERNAL_H
#define STAGECOACH_COORDINATOR_HTTP_INTERNAL_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"
#include "coordinator/api_answer.h"
#include "coordinator/api_error.h"
#include "coordinator/api_request.h"
#include "coordinator/engine.h"
#include "coordinator/http.h"
#include "coordinator/metrics.h"

enum {
	HTTP_API_THREADS = 3,
	HTTP_CONNECTION_MEMORY = 32 << 10, // headers of a request have to fit
	HTTP_PING_MS = 15000,		   // silence after which a stream gets ": ping"
	HTTP_PENDING_MAX = 2 << 20,	   // bytes of a stream that its client has not taken
	HTTP_SEND_BUFFER = 64 << 10,	   // kernel's, of a streaming socket
	HTTP_BODIES_MAX = 512 << 20,	   // bytes of all request bodies that are being received
	HTTP_REQUEST_TIMEOUT_MS = 120000,  // from the first silence to a complete request
	HTTP_SLOWEST_BYTES_PER_S = 10000,  // at which a whole answer may be taken, beyond the slow-client timeout
};

struct http_server;
struct http_request;

// One accepted connection. In the server's list under conn_lock.
struct http_conn {
	struct http_conn *prev, *next;
	int fd;
	int64_t deadline_ms; // then it is shut down; 0: none
};

// One prompt of a request: what the engine knows as a request.
struct http_sub {
	struct http_request *request;
	uint64_t engine_id;
	uint32_t first_choice, n_choices, n_ended;
	bool submitted;
};

enum http_route_id {
	ROUTE_CHAT,
	ROUTE_COMPLETIONS,
	ROUTE_TOKENIZE,
	ROUTE_DETOKENIZE,
	ROUTE_MODELS,
	ROUTE_HEALTH,
	ROUTE_READY,
	ROUTE_METRICS,
	ROUTE_NONE
};

enum http_answer_kind { ANSWER_NONE, ANSWER_WHOLE, ANSWER_STREAM, ANSWER_CLOSE };
enum http_stream_end {
	STREAM_RUNNING,
	STREAM_ENDED,  // the rest, then [DONE]'s proper end
	STREAM_FAILED, // the rest, then the connection is closed
	STREAM_BROKEN, // closed at once
};

struct http_request {
	atomic_int refs;
	struct http_server *server;
	struct MHD_Connection *connection;
	struct http_conn *conn;
	enum http_route_id route;
	bool chunked; // streams are framed (HTTP/1.1)
	char request_id[132];
	int64_t arrival_us;

	struct json_buf body;
	uint64_t discarded;
	bool refused; // error holds why; the body is read and thrown away
	bool dispatched;

	enum http_answer_kind answer_kind;
	int http_status;
	const char *content_type;
	unsigned retry_after_s;
	char allow[32];
	struct api_error error;
	struct json_buf answer_body;

	struct api_request api;
	struct api_answer answer;
	struct http_sub *subs;
	uint32_t n_subs;

	// Stream thread.
	bool ready; // handed over whole; the engine may have been quicker
	bool done;  // handed back
	bool failed;
	bool ending; // all was written, the client has to take the rest
	bool watched, want_write, dirty, got_token;
	int fd; // own duplicate of the connection's
	uint32_t n_unfinished;
	uint32_t *touched;
	uint32_t n_touched; // choices with something to give out
	bool *is_touched;
	int64_t *last_token_us;			 // per choice
	int64_t last_write_ms, blocked_since_ms; // 0: not blocked
	struct http_request *prev, *next;	 // list of those that are ready and not done

	pthread_mutex_t lock; // of what follows: shared by stream thread and libmicrohttpd's
	bool attached, suspended;
	enum http_stream_end end;
	struct json_buf out; // what the client has not taken
	size_t out_pos;

	struct http_request *next_job;
};

enum http_note_kind { NOTE_EVENT, NOTE_READY, NOTE_ABORT, NOTE_GONE, NOTE_STOP };
struct http_note {
	enum http_note_kind kind;
	struct http_request *request; // a reference, except for events
	struct http_sub *sub;
	struct scheduler_event event;
};

struct http_server {
	struct http_options options; // strings owned
	struct model_generation generation;
	struct MHD_Daemon *daemon;
	struct metrics *metrics;
	char address[320];
	int64_t created;
	bool tls;
	unsigned n_keys;
	char **keys;
	int64_t slow_ms;
	uint64_t max_body_bytes;

	atomic_bool draining;
	atomic_ulong body_bytes;
	pthread_mutex_t conn_lock;
	struct http_conn *conns;

	pthread_mutex_t job_lock;
	pthread_cond_t job_wake;
	struct http_request *first_job, *last_job;
	unsigned n_jobs, n_chat_jobs_running;
	bool jobs_stop;
	pthread_t api_threads[HTTP_API_THREADS];

	pthread_mutex_t busy_lock; // of the two counts
	pthread_cond_t idle;
	uint32_t busy_requests; // given to an API thread and not handed back
	uint64_t live_subs;	// the engine may still call back

	pthread_mutex_t note_lock;
	struct http_note *notes; // for the stream thread
	size_t n_notes, notes_capacity;
	bool stream_stop;
	int wake_fd, epoll_fd;
	pthread_t stream_thread;
	struct http_request *active; // stream thread's, as is the next
	bool stopped;		     // whatever comes ends with an error
};

int64_t http_now_us(void); // CLOCK_MONOTONIC
void http_random_hex(char *out, unsigned digits);

void http_request_ref(struct http_request *);
void http_request_unref(struct http_request *);
// Turns r->error into the answer.
void http_answer_error(struct http_request *);
// The answer is there: libmicrohttpd's thread takes over.
void http_hand_back(struct http_request *);
void http_busy(struct http_server *, int requests, int subs); // changes the two counts

// http_route.c
enum MHD_Result http_access(void *server, struct MHD_Connection *, const char *url, const char *method,
			    const char *version, const char *upload, size_t *upload_size, void **context);
void http_completed(void *server, struct MHD_Connection *, void **context, enum MHD_RequestTerminationCode);
void http_notify_connection(void *server, struct MHD_Connection *, void **context, enum MHD_ConnectionNotificationCode);

// http_job.c
void http_job_push(struct http_request *);
void *http_api_thread(void *server);

// http_stream.c
void http_note_post(struct http_server *, const struct http_note *);
void http_on_events(void *sub, const struct scheduler_event *, uint32_t count); // engine_events_fn
void *http_stream_thread(void *server);
ssize_t http_stream_read(void *request, uint64_t pos, char *buf, size_t max); // MHD_ContentReaderCallback
enum MHD_Result http_stream_queue(struct http_request *, struct MHD_Response **out);

#endif
