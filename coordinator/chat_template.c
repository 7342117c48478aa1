// The helper process and its frames. A keeper thread starts it, compiles the template in it and starts it again whenever
// a rendering had to kill it. The surprising decision: only the keeper forks, because the kernel ends the helper when
// the thread that forked it ends, and a thread that serves HTTP may.
#define _GNU_SOURCE
#include "coordinator/chat_template.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/log.h"
#include "coordinator/chat_rendering.h"
#include "coordinator/tokenizer_internal.h"

enum { START_LIMIT_MS = 30000, DEFAULT_TIME_LIMIT_MS = 5000 };
static const unsigned long default_memory_limit_bytes = 512ul << 20;
static const size_t max_frame_bytes = 256u << 20;

enum state { STATE_STARTING, STATE_READY, STATE_BUSY, STATE_LOST, STATE_REFUSED };
enum answer { ANSWER_RENDERED, ANSWER_RAISED, ANSWER_MEMORY, ANSWER_UNUSABLE };

struct chat_template {
	char *python, *helper_path, *setup; // setup: the first frame
	unsigned time_limit_ms;
	unsigned long memory_limit_bytes;
	pthread_t keeper;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	enum state state;
	bool stopping;
	pid_t pid;           // 0: none
	int fd;              // socket to the helper
	struct error refusal;
};

struct frame { uint8_t *bytes; size_t len; };

static int64_t now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

// --- frames ----------------------------------------------------------------------------------------------------------

// Moves all of the bytes before the deadline. Writing stops too when the helper answers before it has read everything.
static enum status transfer(int fd, void *bytes, size_t len, bool write, int64_t deadline_ms)
{
	uint8_t *p = bytes;
	while (len > 0) {
		int64_t left = deadline_ms - now_ms();
		struct pollfd f = {.fd = fd, .events = write ? POLLOUT : POLLIN};
		if (left <= 0)
			return STATUS_TIMEOUT;
		int n = poll(&f, 1, (int)left);
		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			return STATUS_TIMEOUT;
		ssize_t moved = write ? send(fd, p, len, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, p, len, MSG_DONTWAIT);
		if (moved < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (moved <= 0)
			return STATUS_CLOSED;
		p += moved;
		len -= (size_t)moved;
	}
	return STATUS_OK;
}

static void put_u32(uint8_t *p, uint32_t v)
{
	for (int i = 0; i < 4; i++)
		p[i] = (uint8_t)(v >> 8 * i);
}

static uint32_t get_u32(const uint8_t *p)
{
	return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

// Sends one frame and gets its answer; answer->bytes is malloc'ed.
static enum status exchange(int fd, const struct frame *question, struct frame *answer, int64_t deadline_ms)
{
	uint8_t head[4];
	*answer = (struct frame){0};
	put_u32(head, (uint32_t)question->len);
	TRY(transfer(fd, head, 4, true, deadline_ms));
	TRY(transfer(fd, question->bytes, question->len, true, deadline_ms));
	TRY(transfer(fd, head, 4, false, deadline_ms));
	answer->len = get_u32(head);
	if (answer->len == 0 || answer->len > max_frame_bytes)
		return STATUS_INVALID;
	answer->bytes = malloc(answer->len);
	if (!answer->bytes)
		return STATUS_INVALID;
	enum status status = transfer(fd, answer->bytes, answer->len, false, deadline_ms);
	if (status != STATUS_OK) {
		free(answer->bytes);
		answer->bytes = NULL;
	}
	return status;
}

// --- the process -----------------------------------------------------------------------------------------------------

static void limit(int what, unsigned long value)
{
	setrlimit(what, &(struct rlimit){value, value});
}

// In the child: only calls that are safe behind a fork of a process with threads.
static void become_helper(const struct chat_template *c, int fd, pid_t parent, char *const argv[], char *const env[])
{
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	signal(SIGINT, SIG_IGN); // a Ctrl-C is the coordinator's to handle
	signal(SIGTERM, SIG_DFL);
	signal(SIGPIPE, SIG_DFL);
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || getppid() != parent)
		_exit(126);
	if (dup2(fd, 0) < 0 || dup2(fd, 1) < 0)
		_exit(126);
	if (syscall(SYS_close_range, 3u, ~0u, 0u)) {
		for (int i = 3; i < 65536; i++)
			close(i);
	}
	limit(RLIMIT_AS, c->memory_limit_bytes);
	limit(RLIMIT_CORE, 0);
	limit(RLIMIT_FSIZE, 0);
	execvpe(argv[0], argv, env);
	_exit(127);
}

static enum status start(struct chat_template *c, pid_t *pid, int *fd, struct error *e)
{
	int pair[2];
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
		return error_set(e, STATUS_REFUSED, "chat template helper: no socket pair: %s", strerror(errno));
	char *argv[] = {c->python, "-I", "-B", c->helper_path, NULL};
	// Nothing of the coordinator's environment but what concerns time and libraries.
	static const char *const names[] = {"TZ", "LD_LIBRARY_PATH", "PATH"};
	char *env[5] = {"LANG=C.UTF-8"};
	int n = 1;
	for (int i = 0; i < 3; i++) {
		const char *value = getenv(names[i]);
		if (value && asprintf(&env[n], "%s=%s", names[i], value) > 0)
			n++;
	}
	env[n] = NULL;
	pid_t parent = getpid();
	*pid = fork();
	if (*pid == 0)
		become_helper(c, pair[1], parent, argv, env);
	enum status status = STATUS_OK;
	if (*pid < 0)
		status = error_set(e, STATUS_REFUSED, "chat template helper: cannot fork: %s", strerror(errno));
	while (n > 1)
		free(env[--n]);
	close(pair[1]);
	*fd = pair[0];
	if (status != STATUS_OK)
		close(pair[0]);
	return status;
}

static int end_process(pid_t pid, int fd)
{
	int wait_status = 0;
	close(fd);
	kill(pid, SIGKILL);
	while (waitpid(pid, &wait_status, 0) < 0 && errno == EINTR)
		;
	return wait_status;
}

// Starts a helper and compiles the template in it.
static enum status start_and_compile(struct chat_template *c, pid_t *pid, int *fd, struct error *e)
{
	TRY(start(c, pid, fd, e));
	struct frame setup = {(uint8_t *)c->setup, strlen(c->setup)}, answer;
	enum status status = exchange(*fd, &setup, &answer, now_ms() + START_LIMIT_MS);
	if (status == STATUS_OK && answer.bytes[0] == ANSWER_RENDERED) {
		free(answer.bytes);
		return STATUS_OK;
	}
	if (status == STATUS_CLOSED) { // it ended by itself; a moment later its status can be read
		for (int i = 0; i < 200 && waitid(P_PID, (id_t)*pid, &(siginfo_t){0}, WEXITED | WNOWAIT | WNOHANG) == 0; i++) {
			siginfo_t info = {0};
			waitid(P_PID, (id_t)*pid, &info, WEXITED | WNOWAIT | WNOHANG);
			if (info.si_pid)
				break;
			usleep(5000);
		}
	}
	int ended = end_process(*pid, *fd);
	if (status == STATUS_OK && answer.bytes[0] == ANSWER_UNUSABLE)
		error_set(e, STATUS_REFUSED, "chat template: %.*s", (int)(answer.len - 1), (char *)answer.bytes + 1);
	else if (status == STATUS_OK)
		error_set(e, STATUS_REFUSED, "chat template: compiling it passes %lu MiB of memory", c->memory_limit_bytes >> 20);
	else if (status == STATUS_TIMEOUT)
		error_set(e, STATUS_REFUSED, "chat template: the helper did not compile it within %d s", START_LIMIT_MS / 1000);
	else if (WIFEXITED(ended) && WEXITSTATUS(ended) == 127)
		error_set(e, STATUS_REFUSED, "chat template: cannot run the interpreter %s", c->python);
	else
		error_set(e, STATUS_REFUSED, "chat template: the helper %s %s ended without an answer (status 0x%x)", c->python,
		          c->helper_path, (unsigned)ended);
	free(answer.bytes);
	return STATUS_REFUSED;
}

static void *keep(void *argument)
{
	struct chat_template *c = argument;
	pthread_mutex_lock(&c->lock);
	while (!c->stopping) {
		if (c->state != STATE_STARTING && c->state != STATE_LOST) {
			pthread_cond_wait(&c->changed, &c->lock);
			continue;
		}
		pid_t pid = 0;
		int fd = -1;
		struct error e = {""};
		bool first = c->state == STATE_STARTING;
		pthread_mutex_unlock(&c->lock);
		enum status status = start_and_compile(c, &pid, &fd, &e);
		if (status != STATUS_OK && !first) {
			log_error("%s; trying again in a second", e.text);
			sleep(1);
		}
		pthread_mutex_lock(&c->lock);
		if (status == STATUS_OK) {
			c->pid = pid;
			c->fd = fd;
			c->state = STATE_READY;
		} else if (first) {
			c->refusal = e;
			c->state = STATE_REFUSED;
		}
		pthread_cond_broadcast(&c->changed);
	}
	if (c->pid)
		end_process(c->pid, c->fd);
	c->pid = 0;
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

// --- life ------------------------------------------------------------------------------------------------------------

static char *make_setup(const struct chat_template_options *o, unsigned time_limit_ms, struct error *e)
{
	const struct { const char *name, *text; } specials[] = {
		{"bos_token", o->bos_token}, {"eos_token", o->eos_token}, {"unk_token", o->unk_token}, {"pad_token", o->pad_token},
	};
	json_t *root = json_object(), *map = json_object(), *control = json_array();
	for (size_t i = 0; i < sizeof specials / sizeof *specials; i++)
		if (specials[i].text && *specials[i].text)
			json_object_set_new(map, specials[i].name, json_string(specials[i].text));
	for (uint32_t id = 0; o->tokenizer && id < o->tokenizer->vocab_size; id++) {
		const struct token *k = &o->tokenizer->tokens[id];
		if (k->control && k->text_len) {
			json_t *text = json_stringn(k->text, k->text_len);
			if (text)
				json_array_append_new(control, text);
		}
	}
	json_t *source = json_string(o->source);
	if (!source)
		error_set(e, STATUS_REFUSED, "chat template: is not UTF-8");
	else
		json_object_set(root, "source", source);
	json_object_set_new(root, "specials", map);
	json_object_set_new(root, "control", control);
	json_object_set_new(root, "time_limit_ms", json_integer(time_limit_ms));
	char *setup = source ? json_dumps(root, JSON_COMPACT) : NULL;
	json_decref(source);
	json_decref(root);
	return setup;
}

enum status chat_template_create(struct chat_template **out, const struct chat_template_options *o, struct error *e)
{
	*out = NULL;
	if (strchr(o->python, '/') && access(o->python, X_OK))
		return error_set(e, STATUS_REFUSED, "chat template: cannot run the interpreter %s: %s", o->python, strerror(errno));
	if (access(o->helper_path, R_OK))
		return error_set(e, STATUS_REFUSED, "chat template: cannot read the helper %s: %s", o->helper_path,
		                 strerror(errno));
	struct chat_template *c = xcalloc(1, sizeof *c);
	c->time_limit_ms = o->time_limit_ms ? o->time_limit_ms : DEFAULT_TIME_LIMIT_MS;
	c->memory_limit_bytes = o->memory_limit_bytes ? o->memory_limit_bytes : default_memory_limit_bytes;
	c->setup = make_setup(o, c->time_limit_ms, e);
	if (!c->setup) {
		free(c);
		return STATUS_REFUSED;
	}
	c->python = xstrdup(o->python);
	c->helper_path = xstrdup(o->helper_path);
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->changed, NULL);
	sigset_t all, before; // signals are the main thread's
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int failed = pthread_create(&c->keeper, NULL, keep, c);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	ASSERT(!failed);
	*out = c;
	return STATUS_OK;
}

void chat_template_destroy(struct chat_template **p)
{
	struct chat_template *c = *p;
	if (!c)
		return;
	pthread_mutex_lock(&c->lock);
	c->stopping = true;
	pthread_cond_broadcast(&c->changed);
	pthread_mutex_unlock(&c->lock);
	pthread_join(c->keeper, NULL);
	pthread_cond_destroy(&c->changed);
	pthread_mutex_destroy(&c->lock);
	free(c->python);
	free(c->helper_path);
	free(c->setup);
	free(c);
	*p = NULL;
}

enum status chat_template_wait(struct chat_template *c, struct error *e)
{
	pthread_mutex_lock(&c->lock);
	while (c->state == STATE_STARTING)
		pthread_cond_wait(&c->changed, &c->lock);
	bool refused = c->state == STATE_REFUSED;
	pthread_mutex_unlock(&c->lock);
	return refused ? error_set(e, STATUS_REFUSED, "%s", c->refusal.text) : STATUS_OK;
}

// --- rendering -------------------------------------------------------------------------------------------------------

// Waits for the helper to be free and takes it.
static enum status take(struct chat_template *c, struct error *e)
{
	enum status status = STATUS_OK;
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 60;
	pthread_mutex_lock(&c->lock);
	while (c->state != STATE_READY && c->state != STATE_REFUSED && status == STATUS_OK)
		if (pthread_cond_timedwait(&c->changed, &c->lock, &until) == ETIMEDOUT)
			status = error_set(e, STATUS_BUSY, "the chat template helper is not to be had");
	if (c->state == STATE_REFUSED)
		status = error_set(e, STATUS_INVALID, "%s", c->refusal.text);
	else if (status == STATUS_OK)
		c->state = STATE_BUSY;
	pthread_mutex_unlock(&c->lock);
	return status;
}

static void give_back(struct chat_template *c, bool lost)
{
	if (lost)
		end_process(c->pid, c->fd);
	pthread_mutex_lock(&c->lock);
	if (lost)
		c->pid = 0;
	c->state = lost ? STATE_LOST : STATE_READY;
	pthread_cond_broadcast(&c->changed);
	pthread_mutex_unlock(&c->lock);
}

enum status chat_template_render(struct chat_template *c, const char *messages_json, const char *extra_json,
                                 struct chat_rendering *out, struct error *e)
{
	*out = (struct chat_rendering){0};
	size_t messages_len = strlen(messages_json), extra_len = strlen(extra_json ? extra_json : "{}");
	if (messages_len + extra_len > max_frame_bytes - 4)
		return error_set(e, STATUS_INVALID, "messages of more than %zu MiB", max_frame_bytes >> 20);
	struct frame question = {xmalloc(4 + messages_len + extra_len), 4 + messages_len + extra_len}, answer = {0};
	put_u32(question.bytes, (uint32_t)messages_len);
	memcpy(question.bytes + 4, messages_json, messages_len);
	memcpy(question.bytes + 4 + messages_len, extra_json ? extra_json : "{}", extra_len);
	enum status status = STATUS_CLOSED;
	int kind = -1;
	for (int i = 0; i < 2 && status == STATUS_CLOSED; i++) { // a helper that had died while idle costs one try
		status = take(c, e);
		if (status != STATUS_OK) {
			free(question.bytes);
			return status;
		}
		status = exchange(c->fd, &question, &answer, now_ms() + c->time_limit_ms);
		kind = status == STATUS_OK ? answer.bytes[0] : -1;
		if (kind == ANSWER_RENDERED)
			status = chat_rendering_parse(answer.bytes, answer.len, out);
		give_back(c, status != STATUS_OK || (kind != ANSWER_RENDERED && kind != ANSWER_RAISED));
	}
	if (status == STATUS_TIMEOUT)
		status = error_set(e, STATUS_INVALID, "the chat template took longer than its limit of %u ms", c->time_limit_ms);
	else if (status != STATUS_OK)
		status = error_set(e, STATUS_INVALID, "the chat template ended its process (memory limit %lu MiB)",
		                   c->memory_limit_bytes >> 20);
	else if (kind == ANSWER_MEMORY)
		status = error_set(e, STATUS_INVALID, "the chat template passed its memory limit of %lu MiB",
		                   c->memory_limit_bytes >> 20);
	else if (kind != ANSWER_RENDERED)
		status = error_set(e, STATUS_INVALID, "chat template: %.*s", (int)(answer.len - 1 < 400 ? answer.len - 1 : 400),
		                   (char *)answer.bytes + 1);
	if (status != STATUS_OK)
		free(answer.bytes); // else the rendering has them
	free(question.bytes);
	return status;
}
