// A small HTTP client for tests: one connection, raw bytes out, one answer in. Every wait ends after 20 s with a
// failure.
#ifndef STAGECOACH_TESTS_HTTP_CLIENT_H
#define STAGECOACH_TESTS_HTTP_CLIENT_H

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "coordinator/json_write.h"

static inline int client_connect(const char *address)
{
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){.tv_sec = 20}, sizeof(struct timeval));
	cr_assert_eq(connect(fd, (struct sockaddr *)&to, sizeof to), 0, "connect to %s: %s", address, strerror(errno));
	return fd;
}

static inline void client_send(int fd, const char *text)
{
	size_t len = strlen(text);
	cr_assert_eq(send(fd, text, len, MSG_NOSIGNAL), (ssize_t)len);
}

// Reads until the text holds `until` (NULL: until the connection is closed). The text is the caller's, NUL-terminated.
static inline char *client_read(int fd, const char *until)
{
	struct json_buf b = {0};
	for (;;) {
		char piece[4096];
		ssize_t n = recv(fd, piece, sizeof piece, 0);
		if (n < 0 && errno != ECONNRESET)
			cr_assert_fail("nothing came for 20 s; so far: %.*s", (int)b.len, b.data ? b.data : "");
		if (n > 0)
			json_add(&b, piece, (size_t)n);
		json_add(&b, "", 1);
		b.len--;
		if (n <= 0) {
			if (until)
				cr_assert_fail("closed before '%s' came; so far: %s", until, b.data);
			return b.data;
		}
		if (until && strstr(b.data, until))
			return b.data;
	}
}

// One whole exchange on a connection of its own.
static inline char *client_exchange(const char *address, const char *request)
{
	int fd = client_connect(address);
	client_send(fd, request);
	char *answer = client_read(fd, NULL);
	close(fd);
	return answer;
}

static inline void client_send_post(int fd, const char *path, const char *body)
{
	struct json_buf b = {0};
	json_addf(&b,
		  "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
		  "Content-Length: %zu\r\n\r\n%s",
		  path, strlen(body), body);
	json_add(&b, "", 1);
	client_send(fd, b.data);
	json_buf_free(&b);
}

// POST of a JSON body; the connection is closed afterwards.
static inline char *client_post(const char *address, const char *path, const char *body)
{
	int fd = client_connect(address);
	client_send_post(fd, path, body);
	char *answer = client_read(fd, NULL);
	close(fd);
	return answer;
}

static inline int client_status(const char *answer)
{
	return !strncmp(answer, "HTTP/1.", 7) ? atoi(answer + 9) : -1;
}

#endif
