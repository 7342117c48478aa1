// Every option is one row: name, environment variable, config key, default, range, help. The row drives parsing, --help,
// checks, the environment, the config file and the sample config. The surprising decision: the launcher has no option
// code of its own; it runs `stagecoach-coordinator --resolve VERB ARGS` and reads the result as JSON.
#ifndef STAGECOACH_COMMON_OPTIONS_H
#define STAGECOACH_COMMON_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "common/dtype.h"
#include "common/status.h"

enum { OPTIONS_MAX_DEVICES = 64 };

enum option_device_kind { OPTION_DEVICE_CPU, OPTION_DEVICE_CUDA };
struct option_device { enum option_device_kind kind; int index; int threads; }; // threads 0 = not said
struct option_memory { bool is_fraction; double fraction; uint64_t bytes; };

struct options {
	char verb[16];                 // serve, plan, bench, chat, worker, status, stop
	char model[4096];              // MODEL argument, "" if the verb has none
	bool devices_auto; int n_devices; struct option_device devices[OPTIONS_MAX_DEVICES];
	int n_layers; uint32_t layers[OPTIONS_MAX_DEVICES];           // 0 = auto
	int n_memory; struct option_memory memory[OPTIONS_MAX_DEVICES]; // 0 = defaults
	uint32_t plan_sequences, plan_tokens;
	char host[256]; uint32_t port;
	char api_key_file[4096]; bool no_auth;
	char listen[256]; uint32_t expect;
	uint32_t max_context, max_seqs, max_batch_tokens, max_queue;  // 0 = default by context (see help)
	bool prefix_cache;
	char served_model_name[256]; char chat_template[4096];
	char cors_origin[256]; char tls_cert[4096]; char tls_key[4096]; uint32_t slow_client_timeout_s;
	uint32_t rejoin_timeout_s; char data_address[256];
	char config[4096]; char log_level[16]; char python[4096];
	uint32_t block_size;
	char dtype[16], kv_dtype[16];  // "auto" or a name
	bool load_dummy, batch_invariant, dry_run, json;
	char trace[4096];
	char join[256], key_file[4096], url[512];
	char chat_temperature[16];     // chat; checked by the server
	// bench
	char bench_grid[256];          // see `bench --help`
	// set by the launcher for the processes it starts
	char run_dir[4096];            // folder of mode 0700 with the control and data sockets
	uint32_t worker_index; int watch_fd;
	// Socket pair to the launcher, JSON lines, -1 = none. From it: {"exit":WORKER_INDEX,"pid":N,"how":"signal 9","log":"last lines"}
	// when a worker has died. To it: {"restart":WORKER_INDEX} (only then does the launcher start it again) and
	// {"kill":WORKER_INDEX} (SIGKILL, for one that hangs).
	int launcher_fd;
};

// argv without the program name. Precedence: command line, environment, config file, default. Errors are STATUS_USAGE with
// the option's name, the value and the range. --help prints and returns STATUS_OK with out->verb empty.
enum status options_parse(struct options *out, int argc, char **argv, struct error *);
void options_print_json(const struct options *, FILE *);
void options_print_help(const char *verb, FILE *);
void options_print_sample_config(FILE *);

#endif
