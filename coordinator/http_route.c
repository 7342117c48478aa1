// libmicrohttpd's callbacks: from request line and headers to a body that is whole, and from an answer to the wire. The
// surprising decision: a request that is refused still has its body read and thrown away when that is short, because a
// client that is still sending would otherwise see a reset instead of the answer.
#define _GNU_SOURCE // strcasestr
#include <ctype.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/log.h"
#include "coordinator/http_internal.h"

enum { DISCARDED_BODIES = 4 }; // of the largest size: what is read of a refused body at the most

static const struct route {
	const char *path; // a prefix if it ends with a slash
	bool post;	  // else GET and HEAD
	bool open;	  // needs no key
	enum http_route_id id;
} routes[] = {
    {"/v1/chat/completions", true, false, ROUTE_CHAT},
    {"/v1/completions", true, false, ROUTE_COMPLETIONS},
    {"/tokenize", true, false, ROUTE_TOKENIZE},
    {"/detokenize", true, false, ROUTE_DETOKENIZE},
    {"/v1/models", false, false, ROUTE_MODELS},
    {"/v1/models/", false, false, ROUTE_MODELS},
    {"/health", false, true, ROUTE_HEALTH},
    {"/ready", false, true, ROUTE_READY},
    {"/metrics", false, false, ROUTE_METRICS},
};

static const struct route *find_route(const char *url)
{
	for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
		size_t n = strlen(routes[i].path);
		bool prefix = routes[i].path[n - 1] == '/';
		if (prefix ? !strncmp(url, routes[i].path, n) && url[n] : !strcmp(url, routes[i].path))
			return &routes[i];
	}
	return NULL;
}

static const char *header(struct http_request *r, const char *name)
{
	return MHD_lookup_connection_value(r->connection, MHD_HEADER_KIND, name);
}

// ---- what every answer carries

static void add_cors(struct http_request *r, struct MHD_Response *response)
{
	const char *origin = r->server->options.cors_origin;
	if (!origin || !origin[0])
		return;
	MHD_add_response_header(response, "Access-Control-Allow-Origin", origin);
	MHD_add_response_header(response, "Access-Control-Expose-Headers", "x-request-id, retry-after");
	if (strcmp(origin, "*") != 0)
		MHD_add_response_header(response, "Vary", "Origin");
}

static enum MHD_Result queue(struct http_request *r, int http_status, struct MHD_Response *response)
{
	if (!response)
		return MHD_NO;
	MHD_add_response_header(response, "x-request-id", r->request_id);
	add_cors(r, response);
	if (r->content_type)
		MHD_add_response_header(response, "Content-Type", r->content_type);
	if (r->allow[0])
		MHD_add_response_header(response, "Allow", r->allow);
	if (http_status == 401)
		MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
	if (r->retry_after_s) {
		char text[16];
		snprintf(text, sizeof text, "%u", r->retry_after_s);
		MHD_add_response_header(response, "Retry-After", text);
	}
	enum MHD_Result result = MHD_queue_response(r->connection, (unsigned)http_status, response);
	MHD_destroy_response(response);
	return result;
}

static void set_deadline(struct http_request *r, int64_t ms)
{
	if (!r->conn)
		return;
	pthread_mutex_lock(&r->server->conn_lock);
	r->conn->deadline_ms = ms ? http_now_us() / 1000 + ms : 0;
	pthread_mutex_unlock(&r->server->conn_lock);
}

static enum MHD_Result queue_whole(struct http_request *r)
{
	size_t len = r->answer_body.len;
	set_deadline(r, r->server->slow_ms + (int64_t)len * 1000 / HTTP_SLOWEST_BYTES_PER_S);
	struct MHD_Response *response =
	    MHD_create_response_from_buffer(len, r->answer_body.data, MHD_RESPMEM_MUST_FREE);
	if (response)
		r->answer_body = (struct json_buf){0};
	if (!r->content_type && len)
		r->content_type = "application/json";
	return queue(r, r->http_status, response);
}

static enum MHD_Result queue_stream(struct http_request *r)
{
	struct MHD_Response *response;
	if (http_stream_queue(r, &response) != MHD_YES)
		return MHD_NO;
	MHD_add_response_header(response, "Cache-Control", "no-cache");
	MHD_add_response_header(response, "X-Accel-Buffering", "no");
	r->content_type = "text/event-stream; charset=utf-8";
	return queue(r, 200, response);
}

static enum MHD_Result queue_answer(struct http_request *r)
{
	switch (r->answer_kind) {
	case ANSWER_WHOLE:
		return queue_whole(r);
	case ANSWER_STREAM:
		return queue_stream(r);
	default:
		return MHD_NO; // the client is gone: closes the connection
	}
}

static enum MHD_Result queue_error(struct http_request *r)
{
	http_answer_error(r);
	return queue_answer(r);
}

static enum MHD_Result queue_options(struct http_request *r)
{
	struct MHD_Response *response = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
	const char *origin = r->server->options.cors_origin;
	if (response && origin && origin[0]) {
		const char *wanted = header(r, "Access-Control-Request-Headers");
		MHD_add_response_header(response, "Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS");
		MHD_add_response_header(response, "Access-Control-Allow-Headers",
					wanted ? wanted : "authorization, content-type, x-request-id");
		MHD_add_response_header(response, "Access-Control-Max-Age", "600");
	}
	set_deadline(r, r->server->slow_ms);
	return queue(r, 204, response);
}

// ---- small answers

static void answer_models(struct http_request *r, const char *wanted)
{
	struct http_server *s = r->server;
	const char *id = s->options.served_model_name;
	if (wanted && strcmp(wanted, id) != 0) {
		api_error_set(&r->error, 404, "model_not_found", "The model '%.200s' does not exist.", wanted);
		http_answer_error(r);
		return;
	}
	struct engine_info *info = xcalloc(1, sizeof *info);
	engine_get_info(s->options.engine, info);
	struct json_buf *out = &r->answer_body;
	if (!wanted)
		json_adds(out, "{\"object\":\"list\",\"data\":[");
	json_adds(out, "{\"id\":");
	json_add_string(out, id, strlen(id));
	json_addf(
	    out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"stagecoach\",\"root\":", (long long)s->created);
	json_add_string(out, id, strlen(id));
	json_addf(out, ",\"parent\":null,\"max_model_len\":%u}", info->max_context);
	if (!wanted)
		json_adds(out, "]}");
	free(info);
}

static void answer_state(struct http_request *r, bool ready_wanted)
{
	struct engine_info *info = xcalloc(1, sizeof *info);
	engine_get_info(r->server->options.engine, info);
	bool ready = info->ready && !atomic_load(&r->server->draining);
	if (ready_wanted ? ready : info->healthy) {
		json_adds(&r->answer_body, ready_wanted ? "{\"status\":\"ready\"}" : "{\"status\":\"ok\"}");
	} else {
		if (ready_wanted)
			api_error_set(&r->error, 503, "not_ready", "the pipeline is not ready");
		else
			api_error_set(&r->error, 503, "unhealthy", "%s",
				      info->failure[0] ? info->failure : "the pipeline cannot recover");
		http_answer_error(r);
	}
	free(info);
}

static void answer_metrics(struct http_request *r)
{
	struct engine_info *info = xcalloc(1, sizeof *info);
	engine_get_info(r->server->options.engine, info);
	metrics_write(r->server->metrics, info, &r->answer_body);
	r->content_type = "text/plain; version=0.0.4; charset=utf-8";
	free(info);
}

static enum MHD_Result answer_small(struct http_request *r, const char *url)
{
	r->http_status = 200;
	r->answer_kind = ANSWER_WHOLE;
	if (r->route == ROUTE_MODELS)
		answer_models(r, !strncmp(url, "/v1/models/", 11) ? url + 11 : NULL);
	else if (r->route == ROUTE_METRICS)
		answer_metrics(r);
	else
		answer_state(r, r->route == ROUTE_READY);
	return queue_answer(r);
}

// ---- checks before the body

// Takes time that depends on the lengths only.
static bool key_matches(const char *key, const char *given)
{
	size_t n = strlen(given), m = strlen(key);
	volatile unsigned diff = n != m;
	for (size_t i = 0; i < m; i++)
		diff |= (unsigned char)key[i] ^ (unsigned char)(i < n ? given[i] : ~key[i]);
	return diff == 0;
}

static bool authorized(struct http_request *r)
{
	struct http_server *s = r->server;
	if (!s->n_keys)
		return true;
	const char *given = header(r, "Authorization");
	if (given && !strncasecmp(given, "Bearer ", 7))
		given += 7;
	else
		given = header(r, "X-Api-Key");
	if (!given)
		return false;
	while (*given == ' ')
		given++;
	bool found = false;
	for (unsigned i = 0; i < s->n_keys; i++)
		found |= key_matches(s->keys[i], given);
	return found;
}

// application/json, or application/anything+json, in UTF-8.
static void check_content_type(struct http_request *r)
{
	const char *type = header(r, "Content-Type"), *encoding = header(r, "Content-Encoding");
	char media[128];
	snprintf(media, sizeof media, "%s", type ? type : "");
	char *parameters = strchr(media, ';');
	if (parameters)
		*parameters++ = 0;
	size_t n = strlen(media);
	while (n && isspace((unsigned char)media[n - 1]))
		media[--n] = 0;
	bool is_json = !strcasecmp(media, "application/json") ||
		       (n > 17 && !strncasecmp(media, "application/", 12) && !strcasecmp(media + n - 5, "+json"));
	if (!is_json) {
		api_error_set(&r->error, 415, "unsupported_media_type", "Content-Type must be application/json");
	} else if (encoding && strcasecmp(encoding, "identity") != 0) {
		api_error_set(&r->error, 415, "unsupported_media_type", "Content-Encoding must be identity");
	} else {
		const char *charset = parameters ? strcasestr(parameters, "charset=") : NULL;
		if (!charset)
			return;
		charset += 8 + (charset[8] == '"');
		if (!strncasecmp(charset, "utf-8", 5) || !strncasecmp(charset, "utf8", 4) ||
		    !strncasecmp(charset, "us-ascii", 8))
			return;
		api_error_set(&r->error, 400, "unsupported_charset", "the body must be in UTF-8");
	}
	r->refused = true;
}

static bool generates(const struct http_request *r)
{
	return r->route == ROUTE_CHAT || r->route == ROUTE_COMPLETIONS;
}

static void check_head(struct http_request *r, const char *url, const char *method)
{
	const struct route *route = find_route(url);
	r->refused = true;
	if (!(route && route->open) && !authorized(r)) {
		api_error_set(&r->error, 401, "invalid_api_key",
			      "a valid API key is required: Authorization: Bearer KEY");
		metrics_refused(r->server->metrics, REFUSED_UNAUTHORIZED);
		return;
	}
	if (!route) {
		api_error_set(&r->error, 404, "not_found", "there is nothing at %.200s", url);
		return;
	}
	bool get = !strcmp(method, "GET") || !strcmp(method, "HEAD");
	if (route->post ? strcmp(method, "POST") != 0 : !get) {
		snprintf(r->allow, sizeof r->allow, "%s", route->post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS");
		api_error_set(&r->error, 405, "method_not_allowed", "%.32s is not allowed here, only %s", method,
			      r->allow);
		return;
	}
	r->refused = false;
	r->route = route->id;
	if (!route->post)
		return;
	check_content_type(r);
	const char *length = header(r, "Content-Length");
	if (length && strtoull(length, NULL, 10) > r->server->max_body_bytes) {
		api_error_set(&r->error, 413, "body_too_large", "the body has %s bytes, at most %llu are allowed",
			      length, (unsigned long long)r->server->max_body_bytes);
		r->refused = true;
	}
	if (r->refused && generates(r))
		metrics_refused(r->server->metrics, REFUSED_INVALID);
}

// The client's own id if it is harmless, else a new one.
static void choose_request_id(struct http_request *r)
{
	const char *given = header(r, "x-request-id");
	size_t n = given ? strlen(given) : 0;
	bool sane = n >= 1 && n <= 128;
	for (size_t i = 0; sane && i < n; i++)
		sane = isalnum((unsigned char)given[i]) || strchr("-_.:/+=@", given[i]);
	if (sane)
		memcpy(r->request_id, given, n + 1);
	else
		http_random_hex(r->request_id, 32);
}

static struct http_request *new_request(struct http_server *s, struct MHD_Connection *connection, const char *version)
{
	struct http_request *r = xcalloc(1, sizeof *r);
	atomic_init(&r->refs, 1);
	pthread_mutex_init(&r->lock, NULL);
	r->server = s;
	r->connection = connection;
	r->fd = -1;
	r->route = ROUTE_NONE;
	r->chunked = strcmp(version, MHD_HTTP_VERSION_1_0) != 0;
	const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
	r->conn = info ? info->socket_context : NULL;
	choose_request_id(r);
	return r;
}

static enum MHD_Result begin(struct http_server *s, struct MHD_Connection *connection, const char *url,
			     const char *method, const char *version, void **context)
{
	struct http_request *r = new_request(s, connection, version);
	*context = r;
	set_deadline(r, HTTP_REQUEST_TIMEOUT_MS);
	if (!strcmp(method, "OPTIONS"))
		return MHD_YES;
	check_head(r, url, method);
	const char *length = header(r, "Content-Length");
	if (r->refused &&
	    (header(r, "Expect") || (length && strtoull(length, NULL, 10) > DISCARDED_BODIES * s->max_body_bytes)))
		return queue_error(r); // without asking for the body; the connection closes
	return MHD_YES;
}

// ---- the body

static enum MHD_Result take_body(struct http_request *r, const char *upload, size_t *size)
{
	struct http_server *s = r->server;
	if (!r->refused && r->body.len + *size > s->max_body_bytes) {
		api_error_set(&r->error, 413, "body_too_large", "the body is larger than %llu bytes",
			      (unsigned long long)s->max_body_bytes);
		r->refused = true;
	}
	if (!r->refused) {
		size_t before = r->body.capacity;
		json_add(&r->body, upload, *size);
		size_t more = r->body.capacity - before;
		if (atomic_fetch_add(&s->body_bytes, more) + more > HTTP_BODIES_MAX) {
			api_error_set(&r->error, 503, "overloaded", "too many bytes of requests are being received");
			r->refused = true;
		}
	}
	if (r->refused) {
		atomic_fetch_sub(&s->body_bytes, r->body.capacity);
		json_buf_free(&r->body);
		r->discarded += *size;
		if (r->discarded > DISCARDED_BODIES * s->max_body_bytes)
			return MHD_NO;
	}
	*size = 0;
	return MHD_YES;
}

static enum MHD_Result dispatch(struct http_request *r)
{
	struct http_server *s = r->server;
	pthread_mutex_lock(&s->job_lock);
	unsigned waiting = s->n_jobs;
	pthread_mutex_unlock(&s->job_lock);
	if (atomic_load(&s->draining)) {
		api_error_set(&r->error, 503, "draining", "the server is ending");
		if (generates(r))
			metrics_refused(s->metrics, REFUSED_UNAVAILABLE);
		return queue_error(r);
	}
	if (waiting >= s->options.max_queue) {
		api_error_set(&r->error, 429, "queue_full", "%u requests are waiting, at most %u may", waiting,
			      s->options.max_queue);
		if (generates(r))
			metrics_refused(s->metrics, REFUSED_QUEUE_FULL);
		return queue_error(r);
	}
	r->dispatched = true;
	http_busy(s, 1, 0);
	MHD_suspend_connection(r->connection);
	http_job_push(r);
	return MHD_YES;
}

enum MHD_Result http_access(void *server, struct MHD_Connection *connection, const char *url, const char *method,
			    const char *version, const char *upload, size_t *upload_size, void **context)
{
	struct http_request *r = *context;
	if (!r)
		return begin(server, connection, url, method, version, context);
	if (*upload_size)
		return take_body(r, upload, upload_size);
	if (r->answer_kind != ANSWER_NONE)
		return queue_answer(r);
	r->arrival_us = http_now_us();
	set_deadline(r, 0);
	if (!strcmp(method, "OPTIONS"))
		return queue_options(r);
	if (r->refused)
		return queue_error(r);
	if (r->route <= ROUTE_DETOKENIZE)
		return dispatch(r);
	return answer_small(r, url);
}

void http_completed(void *server, struct MHD_Connection *connection, void **context,
		    enum MHD_RequestTerminationCode why)
{
	struct http_request *r = *context;
	*context = NULL;
	if (!r)
		return;
	set_deadline(r, HTTP_REQUEST_TIMEOUT_MS);
	r->conn = NULL;
	if (r->answer_kind == ANSWER_STREAM) { // it may have ended before the stream thread knew
		http_request_ref(r);
		http_note_post(r->server, &(struct http_note){.kind = NOTE_GONE, .request = r});
	}
	http_request_unref(r);
}

void http_notify_connection(void *server, struct MHD_Connection *connection, void **context,
			    enum MHD_ConnectionNotificationCode code)
{
	struct http_server *s = server;
	if (code == MHD_CONNECTION_NOTIFY_STARTED) {
		struct http_conn *c = xcalloc(1, sizeof *c);
		c->fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
		c->deadline_ms = http_now_us() / 1000 + HTTP_REQUEST_TIMEOUT_MS;
		setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
		setsockopt(c->fd, SOL_SOCKET, SO_KEEPALIVE, &(int){1}, sizeof(int));
		setsockopt(c->fd, IPPROTO_TCP, TCP_KEEPIDLE, &(int){30}, sizeof(int));
		setsockopt(c->fd, IPPROTO_TCP, TCP_KEEPINTVL, &(int){10}, sizeof(int));
		pthread_mutex_lock(&s->conn_lock);
		c->next = s->conns;
		if (c->next)
			c->next->prev = c;
		s->conns = c;
		pthread_mutex_unlock(&s->conn_lock);
		*context = c;
		return;
	}
	struct http_conn *c = *context;
	if (!c)
		return;
	pthread_mutex_lock(&s->conn_lock);
	if (c->prev)
		c->prev->next = c->next;
	else
		s->conns = c->next;
	if (c->next)
		c->next->prev = c->prev;
	pthread_mutex_unlock(&s->conn_lock);
	free(c);
	*context = NULL;
}
