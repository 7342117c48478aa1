// See launcher.h.
#include "coordinator/launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/log.h"

void launcher_init(struct launcher *l, int fd)
{
	l->fd = fd;
	l->present = fd >= 0;
	l->used = 0;
	if (fd >= 0)
		fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static bool parse_exit(const char *line, size_t len, struct launcher_exit *out)
{
	json_error_t error;
	json_t *j = json_loadb(line, len, 0, &error);
	json_int_t worker = -1, pid = 0;
	const char *how = "", *log = "";
	bool ok = j && !json_unpack(j, "{s:I, s?I, s?s, s?s}", "exit", &worker, "pid", &pid, "how", &how, "log", &log) &&
	          worker >= 0 && worker < 4096;
	if (ok) {
		out->worker = (uint32_t)worker;
		out->pid = (uint32_t)pid;
		if (sscanf(how, "exit status %d", &out->exit_status) != 1)
			out->exit_status = -1;
		snprintf(out->how, sizeof out->how, "%s", how);
		snprintf(out->log, sizeof out->log, "%s", log);
	}
	json_decref(j);
	return ok;
}

bool launcher_next_exit(struct launcher *l, struct launcher_exit *out)
{
	for (;;) {
		char *end = memchr(l->buffer, '\n', l->used);
		if (end) {
			size_t n = (size_t)(end - l->buffer) + 1;
			bool ok = parse_exit(l->buffer, n - 1, out);
			l->used -= n;
			memmove(l->buffer, end + 1, l->used);
			if (ok)
				return true;
			log_warn("the launcher sent a line that is not understood");
			continue;
		}
		if (l->used == sizeof l->buffer)
			l->used = 0;
		if (l->fd < 0)
			return false;
		ssize_t n = recv(l->fd, l->buffer + l->used, sizeof l->buffer - l->used, MSG_DONTWAIT);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return false;
		if (n <= 0) {
			close(l->fd);
			l->fd = -1;
			return false;
		}
		l->used += (size_t)n;
	}
}

static void tell(struct launcher *l, const char *verb, uint32_t worker)
{
	char line[64];
	int n = snprintf(line, sizeof line, "{\"%s\":%u}\n", verb, worker);
	if (l->fd >= 0 && send(l->fd, line, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) != n)
		log_warn("the launcher does not take orders: cannot %s worker %u", verb, worker);
}

void launcher_restart(struct launcher *l, uint32_t worker)
{
	tell(l, "restart", worker);
}

void launcher_kill(struct launcher *l, uint32_t worker)
{
	tell(l, "kill", worker);
}
