// The channel to the launcher that started the coordinator: JSON lines over a socket pair (options.h says which). The
// surprising decision: a launcher that does not read is not waited for, since it can only be stopped or gone.
#ifndef STAGECOACH_COORDINATOR_LAUNCHER_H
#define STAGECOACH_COORDINATOR_LAUNCHER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct launcher {
	int fd;            // -1: none, or it has hung up
	bool present;      // there was one at start
	char buffer[65536];
	size_t used;
};

struct launcher_exit {
	uint32_t worker, pid;
	int exit_status;   // -1: ended by a signal, or unknown
	char how[96];      // "signal 9 (SIGKILL)", "exit status 3"
	char log[2048];    // its last lines
};

void launcher_init(struct launcher *, int fd); // made non-blocking; -1: none
// Takes the next report; false if there is none now.
bool launcher_next_exit(struct launcher *, struct launcher_exit *out);
void launcher_restart(struct launcher *, uint32_t worker);
void launcher_kill(struct launcher *, uint32_t worker);

#endif
