// Start and stop of the HTTP server. See http.h; http_internal.h says which thread owns what.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/log.h"
#include "coordinator/http_internal.h"

enum { MAX_SMALL_FILE = 1 << 20, MHD_THREADS = 2, STOP_LIMIT_S = 10 };

int64_t http_now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void http_random_hex(char *out, unsigned digits)
{
	unsigned char bytes[32];
	ASSERT(digits <= 2 * sizeof bytes && getrandom(bytes, sizeof bytes, 0) == sizeof bytes);
	for (unsigned i = 0; i < digits; i++)
		out[i] = "0123456789abcdef"[bytes[i / 2] >> (i % 2 * 4) & 15];
	out[digits] = 0;
}

void http_request_ref(struct http_request *r)
{
	atomic_fetch_add(&r->refs, 1);
}

void http_request_unref(struct http_request *r)
{
	if (atomic_fetch_sub(&r->refs, 1) != 1)
		return;
	atomic_fetch_sub(&r->server->body_bytes, r->body.capacity);
	json_buf_free(&r->body);
	json_buf_free(&r->answer_body);
	json_buf_free(&r->out);
	api_answer_free(&r->answer);
	api_request_free(&r->api);
	free(r->subs);
	free(r->touched);
	free(r->is_touched);
	free(r->last_token_us);
	pthread_mutex_destroy(&r->lock);
	free(r);
}

void http_answer_error(struct http_request *r)
{
	r->answer_kind = ANSWER_WHOLE;
	r->http_status = r->error.http_status;
	r->retry_after_s = r->error.retry_after_s;
	r->content_type = "application/json";
	r->answer_body.len = 0;
	api_error_write(&r->error, &r->answer_body);
}

void http_hand_back(struct http_request *r)
{
	http_request_ref(r); // once resumed, the connection may end before this call returns
	MHD_resume_connection(r->connection);
	http_request_unref(r);
}

void http_busy(struct http_server *s, int requests, int subs)
{
	pthread_mutex_lock(&s->busy_lock);
	s->busy_requests += (uint32_t)requests;
	s->live_subs += (uint64_t)(int64_t)subs;
	if (!s->busy_requests && !s->live_subs)
		pthread_cond_broadcast(&s->idle);
	pthread_mutex_unlock(&s->busy_lock);
}

// ---- files

static enum status read_small_file(const char *path, char **out, struct error *e)
{
	*out = NULL;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return error_set(e, STATUS_USAGE, "%s: %s", path, strerror(errno));
	char *data = xmalloc(MAX_SMALL_FILE + 1);
	size_t len = 0;
	ssize_t n;
	while (len < MAX_SMALL_FILE && (n = read(fd, data + len, MAX_SMALL_FILE - len)) > 0)
		len += (size_t)n;
	close(fd);
	if (!len || len == MAX_SMALL_FILE || memchr(data, 0, len)) {
		free(data);
		return error_set(e, STATUS_USAGE, "%s: expected a text file of 1 to %d bytes", path,
				 MAX_SMALL_FILE - 1);
	}
	data[len] = 0;
	*out = data;
	return STATUS_OK;
}

static enum status read_keys(struct http_server *s, const char *path, struct error *e)
{
	char *text;
	TRY(read_small_file(path, &text, e));
	for (char *save, *line = strtok_r(text, "\r\n", &save); line; line = strtok_r(NULL, "\r\n", &save)) {
		while (*line == ' ' || *line == '\t')
			line++;
		size_t n = strlen(line);
		while (n && (line[n - 1] == ' ' || line[n - 1] == '\t'))
			line[--n] = 0;
		if (!n || line[0] == '#')
			continue;
		s->keys = xrealloc(s->keys, (s->n_keys + 1) * sizeof *s->keys);
		s->keys[s->n_keys++] = xstrdup(line);
	}
	free(text);
	if (!s->n_keys)
		return error_set(e, STATUS_USAGE, "%s: holds no API key", path);
	return STATUS_OK;
}

// ---- listening

static bool is_loopback(const struct sockaddr *a)
{
	if (a->sa_family == AF_INET)
		return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
	return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

static int try_listen(const struct addrinfo *a)
{
	int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -1;
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
	if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 4096) == 0)
		return fd;
	int saved = errno;
	close(fd);
	errno = saved;
	return -1;
}

static enum status listen_on(struct http_server *s, int *out, struct error *e)
{
	const char *host = s->options.host;
	char port[16];
	snprintf(port, sizeof port, "%u", s->options.port);
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *list = NULL;
	int rc = getaddrinfo(host, port, &hints, &list);
	if (rc)
		return error_set(e, STATUS_UNAVAILABLE, "host %s: %s", host, gai_strerror(rc));
	enum status status = STATUS_OK;
	int fd = -1;
	if (!is_loopback(list->ai_addr) && !s->n_keys && !s->options.no_auth)
		status = error_set(e, STATUS_USAGE,
				   "--host %s is beyond this machine: give --api-key-file, or --no-auth", host);
	for (const struct addrinfo *a = list; a && fd < 0 && status == STATUS_OK; a = a->ai_next)
		fd = try_listen(a);
	int why = errno;
	freeaddrinfo(list);
	TRY(status);
	if (fd < 0)
		return error_set(e, STATUS_UNAVAILABLE, "port %s on %s: %s", port, host, strerror(why));
	struct sockaddr_storage bound;
	socklen_t len = sizeof bound;
	getsockname(fd, (struct sockaddr *)&bound, &len);
	unsigned real = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
							  : ((struct sockaddr_in *)&bound)->sin_port);
	snprintf(s->address, sizeof s->address, strchr(host, ':') ? "%s://[%s]:%u" : "%s://%s:%u",
		 s->tls ? "https" : "http", host, real);
	*out = fd;
	return STATUS_OK;
}

static unsigned connection_limit(const struct http_options *o)
{
	struct rlimit files;
	if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
		files.rlim_cur = files.rlim_max;
		setrlimit(RLIMIT_NOFILE, &files);
		getrlimit(RLIMIT_NOFILE, &files);
	}
	// A running request has a second descriptor; a hundred or so are for everything else.
	uint64_t most = files.rlim_cur > 512 ? (uint64_t)files.rlim_cur - 256 - files.rlim_cur / 8 : 256;
	if (most > 32768)
		most = 32768;
	return o->max_connections && o->max_connections < most ? o->max_connections : (unsigned)most;
}

__attribute__((format(printf, 2, 0))) static void log_mhd(void *user, const char *fmt, va_list ap)
{
	char text[512];
	vsnprintf(text, sizeof text, fmt, ap);
	text[strcspn(text, "\n")] = 0;
	log_debug("http: %s", text);
}

static enum status start_daemon(struct http_server *s, int listen_fd, struct error *e)
{
	char *cert = NULL, *key = NULL;
	enum status status = STATUS_OK;
	if (s->tls) {
		TRY_GOTO(read_small_file(s->options.tls_cert, &cert, e), out);
		TRY_GOTO(read_small_file(s->options.tls_key, &key, e), out);
	}
	struct MHD_OptionItem tls[] = {
	    {MHD_OPTION_HTTPS_MEM_CERT, 0, cert}, {MHD_OPTION_HTTPS_MEM_KEY, 0, key}, {MHD_OPTION_END, 0, NULL}};
	unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG | MHD_USE_TURBO |
			 (s->tls ? MHD_USE_TLS : 0);
	s->daemon = MHD_start_daemon(
	    flags, 0, NULL, NULL, http_access, s, MHD_OPTION_EXTERNAL_LOGGER, log_mhd, NULL, MHD_OPTION_LISTEN_SOCKET,
	    listen_fd, MHD_OPTION_THREAD_POOL_SIZE, (unsigned)MHD_THREADS, MHD_OPTION_CONNECTION_LIMIT,
	    connection_limit(&s->options), MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HTTP_CONNECTION_MEMORY,
	    MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)(s->slow_ms / 1000), MHD_OPTION_NOTIFY_COMPLETED, http_completed,
	    s, MHD_OPTION_NOTIFY_CONNECTION, http_notify_connection, s, MHD_OPTION_ARRAY, s->tls ? tls : &tls[2],
	    MHD_OPTION_END);
	if (!s->daemon)
		status = s->tls ? error_set(e, STATUS_USAGE, "%s, %s: not a certificate and its key in PEM form",
					    s->options.tls_cert, s->options.tls_key)
				: error_set(e, STATUS_FATAL, "the HTTP server does not start: %s", strerror(errno));
out:
	free(cert);
	if (key)
		explicit_bzero(key, strlen(key));
	free(key);
	return status;
}

// ---- start and stop

static char *copy(const char *s)
{
	return s && s[0] ? xstrdup(s) : NULL;
}

static struct http_server *new_server(const struct http_options *o)
{
	struct http_server *s = xcalloc(1, sizeof *s);
	s->options = *o;
	s->options.served_model_name = xstrdup(o->served_model_name);
	s->options.host = xstrdup(o->host && o->host[0] ? o->host : "127.0.0.1");
	s->options.api_key_file = copy(o->api_key_file);
	s->options.cors_origin = copy(o->cors_origin);
	s->options.tls_cert = copy(o->tls_cert);
	s->options.tls_key = copy(o->tls_key);
	s->options.max_queue = o->max_queue ? o->max_queue : 1024;
	s->generation = o->generation ? *o->generation : *tokenizer_generation(o->tokenizer);
	s->max_body_bytes = o->max_body_bytes ? o->max_body_bytes : 16 << 20;
	s->slow_ms = 1000 * (int64_t)(o->slow_client_timeout_s ? o->slow_client_timeout_s : 60);
	s->tls = s->options.tls_cert || s->options.tls_key;
	s->created = (int64_t)time(NULL);
	s->metrics = metrics_create();
	pthread_mutex_init(&s->conn_lock, NULL);
	pthread_mutex_init(&s->job_lock, NULL);
	pthread_cond_init(&s->job_wake, NULL);
	pthread_mutex_init(&s->busy_lock, NULL);
	pthread_cond_init(&s->idle, NULL);
	pthread_mutex_init(&s->note_lock, NULL);
	s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	ASSERT(s->wake_fd >= 0 && s->epoll_fd >= 0);
	struct epoll_event ev = {.events = EPOLLIN};
	ASSERT(epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, s->wake_fd, &ev) == 0);
	return s;
}

static void free_server(struct http_server *s)
{
	for (unsigned i = 0; i < s->n_keys; i++) {
		explicit_bzero(s->keys[i], strlen(s->keys[i]));
		free(s->keys[i]);
	}
	free(s->keys);
	free(s->notes);
	metrics_destroy(&s->metrics);
	close(s->wake_fd);
	close(s->epoll_fd);
	free((char *)s->options.served_model_name);
	free((char *)s->options.host);
	free((char *)s->options.api_key_file);
	free((char *)s->options.cors_origin);
	free((char *)s->options.tls_cert);
	free((char *)s->options.tls_key);
	pthread_mutex_destroy(&s->conn_lock);
	pthread_mutex_destroy(&s->job_lock);
	pthread_cond_destroy(&s->job_wake);
	pthread_mutex_destroy(&s->busy_lock);
	pthread_cond_destroy(&s->idle);
	pthread_mutex_destroy(&s->note_lock);
	free(s);
}

static void start_threads(struct http_server *s)
{
	ASSERT(pthread_create(&s->stream_thread, NULL, http_stream_thread, s) == 0);
	for (unsigned i = 0; i < HTTP_API_THREADS; i++)
		ASSERT(pthread_create(&s->api_threads[i], NULL, http_api_thread, s) == 0);
}

static void join_api_threads(struct http_server *s)
{
	pthread_mutex_lock(&s->job_lock);
	s->jobs_stop = true;
	pthread_cond_broadcast(&s->job_wake);
	pthread_mutex_unlock(&s->job_lock);
	for (unsigned i = 0; i < HTTP_API_THREADS; i++)
		pthread_join(s->api_threads[i], NULL);
}

static void join_stream_thread(struct http_server *s)
{
	pthread_mutex_lock(&s->note_lock);
	s->stream_stop = true;
	pthread_mutex_unlock(&s->note_lock);
	(void)!write(s->wake_fd, &(uint64_t){1}, 8);
	pthread_join(s->stream_thread, NULL);
}

enum status http_server_start(struct http_server **out, const struct http_options *o, struct error *e)
{
	*out = NULL;
	struct http_server *s = new_server(o);
	int listen_fd = -1;
	enum status status = STATUS_OK;
	if (s->options.api_key_file)
		TRY_GOTO(read_keys(s, s->options.api_key_file, e), fail);
	if (!s->options.tls_cert != !s->options.tls_key) {
		status = error_set(e, STATUS_USAGE, "--tls-cert and --tls-key belong together, only one is given");
		goto fail;
	}
	TRY_GOTO(listen_on(s, &listen_fd, e), fail);
	sigset_t all, old; // signals are the main thread's
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &old);
	start_threads(s);
	status = start_daemon(s, listen_fd, e);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (status != STATUS_OK) {
		join_api_threads(s);
		join_stream_thread(s);
		goto fail;
	}
	*out = s;
	return STATUS_OK;
fail:
	if (listen_fd >= 0)
		close(listen_fd);
	free_server(s);
	return status;
}

const char *http_server_address(const struct http_server *s)
{
	return s->address;
}

// Waits until nothing is in hand; false when limit_s (0: none) passed.
static bool wait_idle(struct http_server *s, unsigned limit_s)
{
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += limit_s;
	pthread_mutex_lock(&s->busy_lock);
	int rc = 0;
	while ((s->busy_requests || s->live_subs) && rc != ETIMEDOUT)
		rc = limit_s ? pthread_cond_timedwait(&s->idle, &s->busy_lock, &until)
			     : pthread_cond_wait(&s->idle, &s->busy_lock);
	bool idle = !s->busy_requests && !s->live_subs;
	pthread_mutex_unlock(&s->busy_lock);
	return idle;
}

void http_server_stop(struct http_server **server, bool drain)
{
	struct http_server *s = *server;
	if (!s)
		return;
	*server = NULL;
	atomic_store(&s->draining, true);
	if (!drain)
		http_note_post(s, &(struct http_note){.kind = NOTE_STOP});
	if (!wait_idle(s, drain ? 0 : STOP_LIMIT_S)) {
		// The engine broke its promise that every request ends; its callback may still come, so nothing is
		// freed.
		log_error("http: requests are still in hand %d s after they were cancelled", STOP_LIMIT_S);
		return;
	}
	MHD_stop_daemon(s->daemon);
	join_api_threads(s);
	join_stream_thread(s);
	free_server(s);
}
