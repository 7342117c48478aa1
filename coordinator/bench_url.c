// `bench --url`: N clients at once, each a streaming completion of random token ids, in one thread over epoll, so that the
// load generator itself costs little on a machine that it shares with the server. The surprising decision: tokens are not
// counted by events (a server may put several into one) but by the usage that the last chunk reports.
#include "coordinator/bench_url.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "coordinator/bench_common.h"

enum { BENCH_TIMEOUT_S = 600 };

// ---- clients ----

struct target {
	struct sockaddr_storage address;
	socklen_t address_len;
	char host[256], path[256];
	char authorization[512];
};

struct client {
	int fd;
	char *request;
	size_t request_len, sent;
	char *answer;                 // the tail of the stream that may still matter
	size_t answer_len, answer_capacity;
	double begin_s, first_s, last_s;
	uint32_t tokens;
	bool done;
};

struct cell_result {
	uint32_t clients, prompt, output;
	uint64_t tokens;
	double wall_s, tokens_per_s;
	double ttft_p50_ms, ttft_p95_ms, itl_p50_ms, itl_p95_ms;
};

static enum status parse_url(struct target *t, const char *url, struct error *e)
{
	if (strncmp(url, "http://", 7))
		return error_set(e, STATUS_USAGE, "--url: '%s' does not begin with http://", url);
	char host[256], port[16] = "80";
	const char *s = url + 7;
	size_t n = strcspn(s, "/");
	if (n == 0 || n >= sizeof host)
		return error_set(e, STATUS_USAGE, "--url: '%s' names no host", url);
	memcpy(host, s, n);
	host[n] = 0;
	snprintf(t->host, sizeof t->host, "%s", host);
	snprintf(t->path, sizeof t->path, "%.*s/v1/completions", (int)strcspn(s + n, "?"), s[n] == '/' && s[n + 1] ? s + n : "");
	char *colon = strrchr(host, ':');
	if (colon) {
		*colon = 0;
		snprintf(port, sizeof port, "%s", colon + 1);
	}
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
	int rc = getaddrinfo(host, port, &hints, &found);
	if (rc)
		return error_set(e, STATUS_UNAVAILABLE, "--url: %s: %s", url, gai_strerror(rc));
	memcpy(&t->address, found->ai_addr, found->ai_addrlen);
	t->address_len = found->ai_addrlen;
	freeaddrinfo(found);
	return STATUS_OK;
}

static enum status read_key(struct target *t, const char *path, struct error *e)
{
	char line[384];
	FILE *f = fopen(path, "r");
	if (!f)
		return error_set(e, STATUS_USAGE, "--api-key-file: %s: %s", path, strerror(errno));
	while (fgets(line, sizeof line, f)) {
		line[strcspn(line, "\r\n")] = 0;
		if (line[0] && line[0] != '#') {
			snprintf(t->authorization, sizeof t->authorization, "Authorization: Bearer %s\r\n", line);
			break;
		}
	}
	fclose(f);
	return STATUS_OK;
}

static void make_request(struct client *c, const struct target *t, uint32_t prompt, uint32_t output, uint64_t *random)
{
	size_t capacity = 512 + (size_t)prompt * 8;
	char *body = xmalloc(capacity);
	size_t n = (size_t)sprintf(body, "{\"stream\":true,\"stream_options\":{\"include_usage\":true},\"temperature\":0,"
	                                 "\"ignore_eos\":true,\"max_tokens\":%u,\"prompt\":[", output);
	for (uint32_t i = 0; i < prompt; i++) {
		*random = *random * 6364136223846793005ull + 1442695040888963407ull;
		// Ids from 300 to 4395 are ordinary pieces in the vocabularies of real models; a smaller one refuses them.
		n += (size_t)sprintf(body + n, "%s%u", i ? "," : "", 300u + (unsigned)(*random >> 52));
	}
	n += (size_t)sprintf(body + n, "]}");
	c->request = xmalloc(n + 1024);
	c->request_len = (size_t)sprintf(c->request, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n%s"
	                                             "Connection: close\r\nContent-Length: %zu\r\n\r\n", t->path, t->host, t->authorization, n);
	memcpy(c->request + c->request_len, body, n);
	c->request_len += n;
	free(body);
}

static enum status client_start(struct client *c, const struct target *t, int epoll, uint32_t index, struct error *e)
{
	c->fd = socket(t->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (c->fd < 0 || connect(c->fd, (const struct sockaddr *)&t->address, t->address_len))
		return error_set(e, STATUS_UNAVAILABLE, "%s: %s", t->host, strerror(errno));
	int one = 1;
	setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	fcntl(c->fd, F_SETFL, O_NONBLOCK);
	c->begin_s = bench_now_s();
	struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT, .data.u32 = index};
	epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &ev);
	return STATUS_OK;
}

static enum status client_write(struct client *c, int epoll, uint32_t index, struct error *e)
{
	while (c->sent < c->request_len) {
		ssize_t n = send(c->fd, c->request + c->sent, c->request_len - c->sent, MSG_NOSIGNAL);
		if (n < 0)
			return errno == EAGAIN ? STATUS_OK : error_set(e, STATUS_FATAL, "sending a request: %s", strerror(errno));
		c->sent += (size_t)n;
	}
	struct epoll_event ev = {.events = EPOLLIN, .data.u32 = index};
	epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &ev);
	return STATUS_OK;
}

static enum status client_finish(struct client *c, struct error *e)
{
	c->answer[c->answer_len] = 0;
	const char *usage = strstr(c->answer, "\"completion_tokens\":");
	if (strncmp(c->answer, "HTTP/1.1 200", 12) || !strstr(c->answer, "[DONE]") || !usage)
		return error_set(e, STATUS_FATAL, "an answer is not a whole stream with usage: %.200s ... %s", c->answer,
		                 c->answer_len > 400 ? c->answer + c->answer_len - 200 : "");
	c->tokens = (uint32_t)strtoul(usage + 20, NULL, 10);
	c->done = true;
	close(c->fd);
	c->fd = -1;
	return STATUS_OK;
}

static enum status client_read(struct client *c, struct error *e)
{
	for (;;) {
		if (c->answer_capacity - c->answer_len < 16384)
			c->answer = xrealloc(c->answer, c->answer_capacity = c->answer_capacity * 2 + 65536);
		ssize_t n = recv(c->fd, c->answer + c->answer_len, c->answer_capacity - c->answer_len - 1, 0);
		if (n < 0 && errno == EAGAIN)
			return STATUS_OK;
		if (n < 0)
			return error_set(e, STATUS_FATAL, "receiving an answer: %s", strerror(errno));
		if (n == 0)
			return client_finish(c, e);
		size_t old = c->answer_len;
		c->answer_len += (size_t)n;
		c->answer[c->answer_len] = 0;
		const char *from = c->answer + (old > 6 ? old - 6 : 0);
		const char *data = strstr(from, "data: {");
		if (data) {
			c->last_s = bench_now_s();
			if (c->first_s == 0)
				c->first_s = c->last_s;
		}
	}
}

static enum status measure_cell(const struct target *t, uint32_t clients, uint32_t prompt, uint32_t output, uint64_t *random,
                                struct cell_result *out, struct error *e)
{
	enum status status = STATUS_OK;
	struct client *c = xcalloc(clients, sizeof *c);
	double *ttft = xcalloc(clients, sizeof *ttft), *itl = xcalloc(clients, sizeof *itl);
	int epoll = epoll_create1(EPOLL_CLOEXEC);
	for (uint32_t i = 0; i < clients; i++) {
		c[i].fd = -1;
		make_request(&c[i], t, prompt, output, random);
	}
	double begin = bench_now_s();
	for (uint32_t i = 0; i < clients; i++)
		TRY_GOTO(client_start(&c[i], t, epoll, i, e), out);
	for (uint32_t left = clients; left;) {
		struct epoll_event events[64];
		int n = epoll_wait(epoll, events, 64, 1000);
		if (bench_now_s() - begin > BENCH_TIMEOUT_S) {
			status = error_set(e, STATUS_FATAL, "%u of %u answers are not complete after %d s", left, clients, BENCH_TIMEOUT_S);
			goto out;
		}
		for (int i = 0; i < n; i++) {
			struct client *k = &c[events[i].data.u32];
			if (events[i].events & EPOLLOUT)
				TRY_GOTO(client_write(k, epoll, events[i].data.u32, e), out);
			if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
				TRY_GOTO(client_read(k, e), out);
			left -= k->done;
		}
	}
	*out = (struct cell_result){.clients = clients, .prompt = prompt, .output = output, .wall_s = bench_now_s() - begin};
	size_t n_itl = 0;
	for (uint32_t i = 0; i < clients; i++) {
		out->tokens += c[i].tokens;
		ttft[i] = 1e3 * (c[i].first_s - c[i].begin_s);
		if (c[i].tokens > 1)
			itl[n_itl++] = 1e3 * (c[i].last_s - c[i].first_s) / (double)(c[i].tokens - 1);
	}
	out->tokens_per_s = (double)out->tokens / out->wall_s;
	qsort(ttft, clients, sizeof *ttft, bench_by_value);
	qsort(itl, n_itl, sizeof *itl, bench_by_value);
	out->ttft_p50_ms = bench_percentile(ttft, clients, 0.5);
	out->ttft_p95_ms = bench_percentile(ttft, clients, 0.95);
	out->itl_p50_ms = bench_percentile(itl, n_itl, 0.5);
	out->itl_p95_ms = bench_percentile(itl, n_itl, 0.95);
out:
	for (uint32_t i = 0; i < clients; i++) {
		if (c[i].fd >= 0)
			close(c[i].fd);
		free(c[i].request);
		free(c[i].answer);
	}
	close(epoll);
	free(ttft);
	free(itl);
	free(c);
	return status;
}

enum status bench_url_run(const struct options *o, struct error *e)
{
	struct bench_grid grid;
	struct target target = {0};
	TRY(bench_grid_parse(&grid, o->bench_grid, e));
	TRY(parse_url(&target, o->url, e));
	if (o->api_key_file[0])
		TRY(read_key(&target, o->api_key_file, e));
	uint64_t random = 88172645463325252ull;
	bool first = true;
	if (o->json)
		printf("{\"url\":\"%s\",\"cells\":[", o->url);
	else
		printf("%8s %8s %8s %6s %12s %12s %12s %12s %12s\n", "clients", "prompt", "output", "run", "out tok/s", "TTFT p50 ms",
		       "TTFT p95 ms", "token p50 ms", "token p95 ms");
	for (int b = 0; b < grid.n_batch; b++)
		for (int p = 0; p < grid.n_prompt; p++)
			for (int n = 0; n < grid.n_output; n++)
				for (uint32_t r = 0; r < grid.repeat; r++) {
					struct cell_result c = {0};
					TRY(measure_cell(&target, grid.batch[b], grid.prompt[p], grid.output[n], &random, &c, e));
					if (o->json)
						printf("%s{\"clients\":%u,\"prompt\":%u,\"output\":%u,\"run\":%u,\"wall_s\":%.4f,\"tokens\":%llu,"
						       "\"tokens_per_s\":%.2f,\"ttft_p50_ms\":%.2f,\"ttft_p95_ms\":%.2f,\"itl_p50_ms\":%.3f,\"itl_p95_ms\":%.3f}",
						       first ? "" : ",", c.clients, c.prompt, c.output, r + 1, c.wall_s, (unsigned long long)c.tokens,
						       c.tokens_per_s, c.ttft_p50_ms, c.ttft_p95_ms, c.itl_p50_ms, c.itl_p95_ms);
					else
						printf("%8u %8u %8u %6u %12.1f %12.1f %12.1f %12.2f %12.2f\n", c.clients, c.prompt, c.output, r + 1,
						       c.tokens_per_s, c.ttft_p50_ms, c.ttft_p95_ms, c.itl_p50_ms, c.itl_p95_ms);
					fflush(stdout);
					first = false;
				}
	if (o->json)
		printf("]}\n");
	return STATUS_OK;
}
