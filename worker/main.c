// stagecoach-worker: one stage of a pipeline. Started by the launcher with the words that it was given itself, plus
// --run-dir, --worker-index and --watch-fd.
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "common/log.h"
#include "common/options.h"
#include "worker/worker.h"

// Refuses what this program cannot do, by name.
static enum status check(const struct options *o, struct error *e)
{
	bool loopback = !strncmp(o->join, "127.", 4) || !strncmp(o->join, "localhost:", 10) || !strncmp(o->join, "[::1]:", 6);
	if (o->join[0] && !loopback)
		return error_set(e, STATUS_USAGE, "--join %s is beyond this machine: hidden states travel on loopback only until their transport has keys", o->join);
	if (!o->join[0] && !o->run_dir[0])
		return error_set(e, STATUS_USAGE, "--run-dir is missing: workers are started by `stagecoach serve` and the like");
	if (!o->devices_auto && o->worker_index >= (uint32_t)o->n_devices)
		return error_set(e, STATUS_USAGE, "--worker-index %u of %d devices", o->worker_index, o->n_devices);
	if (!o->devices_auto && o->devices[o->worker_index].kind != OPTION_DEVICE_CPU)
		return error_set(e, STATUS_UNAVAILABLE, "--devices: cuda:%d needs a GPU worker, which this build does not have",
		                 o->devices[o->worker_index].index);
	return STATUS_OK;
}

int main(int argc, char **argv)
{
	struct error e = {""};
	static struct options o;
	log_set_prefix("worker");
	enum status status = options_parse(&o, argc - 1, argv + 1, &e);
	if (status == STATUS_OK && !o.verb[0])
		return STATUS_OK; // --help
	if (status == STATUS_OK)
		status = check(&o, &e);
	if (status != STATUS_OK) {
		log_error("%s", e.text);
		return status;
	}
	enum log_level level;
	if (log_level_parse(o.log_level, &level))
		log_set_level(level);
	signal(SIGPIPE, SIG_IGN);
	prctl(PR_SET_PDEATHSIG, SIGKILL); // no worker outlives its launcher
	mallopt(M_MMAP_THRESHOLD, 1 << 20); // large blocks go back to the system when freed, whatever was freed before
	return (int)worker_run(&o);
}
