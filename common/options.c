// The table of options and their parsing; see options.h. The surprising decision: values are applied in the order config
// file, environment, command line, through the same row function, so the last one wins and each is checked by the same
// rule with its origin in the error text.
#include "common/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "common/options_table.h"

const struct verb option_verbs[] = {
	{"serve", SERVE, true, "start a coordinator and one worker per device on this machine"},
	{"plan", PLAN, true, "print the split, bytes and blocks per stage and the expected bottleneck; loads nothing"},
	{"bench", BENCH, true, "measure throughput and latency without HTTP, or of a running server with --url"},
	{"chat", CHAT, false, "talk to a running server in the terminal"},
	{"worker", WORKER, false, "join a pipeline from another host"},
	{"status", STATUS, false, "the pipeline at a glance"},
	{"stop", STOP, false, "stop the pipeline of a port; fine if there is none"},
};
const int option_verb_count = sizeof option_verbs / sizeof option_verbs[0];

#define FIELD(f) offsetof(struct options, f), sizeof(((struct options *)0)->f)

const struct row option_rows[] = {
	{"devices", "LIST", MODEL_VERBS | WORKER, KIND_DEVICES, FIELD(devices), 0, 0, "auto", NULL,
	 "auto, or a list in pipeline order: cuda:0,cuda:1,cpu; cpu/8 says threads (auto: every GPU, else one cpu)", false, "cpu/1,cpu/1"},
	{"layers", "LIST", MODEL_VERBS, KIND_LAYERS, FIELD(layers), 0, 0, "auto", NULL,
	 "auto, or layers per stage: 20,12; honoured or refused, never changed", false, "15,15"},
	{"memory", "LIST", MODEL_VERBS | WORKER, KIND_MEMORY, FIELD(memory), 0, 0, NULL, NULL,
	 "fraction of what is free on the device at start, or bytes, one value or one per worker: 0.9 or 20GiB,0.8 "
	 "(0.9 of a GPU, 0.5 on CPUs; workers on one device share it)", false, "0.5"},
	{"plan-for", "SEQUENCES,TOKENS", MODEL_VERBS, KIND_PLAN_FOR, FIELD(plan_sequences), 0, 0, "64,2048", NULL,
	 "the load that the split is planned for", false, NULL},
	{"host", "ADDRESS", SERVE | STATUS | CHAT, KIND_TEXT, FIELD(host), 0, 0, "127.0.0.1", NULL, "where HTTP listens",
	 false, NULL},
	{"port", "N", SERVE | STATUS | CHAT | STOP, KIND_U32, FIELD(port), 0, 65535, "8080", NULL,
	 "port of HTTP; 0 takes a free one", false, NULL},
	{"api-key-file", "FILE", SERVE | CHAT | STATUS | BENCH, KIND_TEXT, FIELD(api_key_file), 0, 0, NULL, NULL,
	 "keys, one a line; needed to listen beyond loopback unless --no-auth", false, "keys.txt"},
	{"no-auth", NULL, SERVE, KIND_FLAG, FIELD(no_auth), 0, 0, NULL, NULL, "allow HTTP beyond loopback without keys",
	 false, NULL},
	{"listen", "HOST:PORT", SERVE, KIND_TEXT, FIELD(listen), 0, 0, NULL, NULL,
	 "control address for workers of other hosts", false, "10.0.0.1:9000"},
	{"expect", "N", SERVE, KIND_U32, FIELD(expect), 0, OPTIONS_MAX_DEVICES, "0", NULL,
	 "how many workers of other hosts to wait for", false, NULL},
	{"max-context", "N", MODEL_VERBS, KIND_U32, FIELD(max_context), 1, 1 << 30, "0", NULL,
	 "tokens of one sequence (default: the most that fits, up to the model's own)", false, "8192"},
	{"max-seqs", "N", MODEL_VERBS, KIND_U32, FIELD(max_seqs), 1, 4096, "256", NULL, "sequences that run at once", false,
	 NULL},
	{"max-batch-tokens", "N", MODEL_VERBS, KIND_U32, FIELD(max_batch_tokens), 1, 65536, "0", NULL,
	 "tokens of one step (default: 2048, 512 with a CPU stage)", false, "512"},
	{"max-queue", "N", SERVE | BENCH, KIND_U32, FIELD(max_queue), 1, 1 << 20, "1024", NULL,
	 "requests that wait; more are refused with 429", false, NULL},
	{"prefix-cache", "on|off", SERVE | BENCH, KIND_ON_OFF, FIELD(prefix_cache), 0, 0, "on", NULL,
	 "reuse the KV blocks of equal beginnings", false, NULL},
	{"served-model-name", "NAME", SERVE, KIND_TEXT, FIELD(served_model_name), 0, 0, NULL, NULL,
	 "the model's id in answers (default: file or folder name)", false, "my-model"},
	{"chat-template", "FILE", SERVE, KIND_TEXT, FIELD(chat_template), 0, 0, NULL, NULL,
	 "a Jinja file instead of the model's own template", false, "template.jinja"},
	{"cors-origin", "ORIGIN", SERVE, KIND_TEXT, FIELD(cors_origin), 0, 0, NULL, NULL,
	 "answer browsers of this origin, or *", false, "*"},
	{"tls-cert", "FILE", SERVE, KIND_TEXT, FIELD(tls_cert), 0, 0, NULL, NULL, "certificate for HTTPS (PEM)", false,
	 "cert.pem"},
	{"tls-key", "FILE", SERVE, KIND_TEXT, FIELD(tls_key), 0, 0, NULL, NULL, "its key (PEM)", false, "key.pem"},
	{"slow-client-timeout", "SECONDS", SERVE, KIND_U32, FIELD(slow_client_timeout_s), 1, 86400, "60", NULL,
	 "a client that takes nothing for so long is dropped", false, NULL},
	{"rejoin-timeout", "SECONDS", SERVE | WORKER, KIND_U32, FIELD(rejoin_timeout_s), 1, 86400, "60", NULL,
	 "how long a worker of another host is waited for, and waits", false, NULL},
	{"data-address", "ADDRESS", SERVE | WORKER, KIND_TEXT, FIELD(data_address), 0, 0, NULL, NULL,
	 "where a worker takes hidden states from other hosts: ADDRESS, ADDRESS:PORT or ADDRESS:PORT-PORT, loopback only so far "
	 "(default: loopback, any port)", false, "127.0.0.1:9100-9110"},
	{"config", "FILE", ALL, KIND_TEXT, FIELD(config), 0, 0, NULL, NULL, "file with lines `option = value`", false,
	 NULL},
	{"log-level", "LEVEL", ALL, KIND_CHOICE, FIELD(log_level), 0, 0, "info", "error|warn|info|debug",
	 "error, warn, info or debug", false, NULL},
	{"python", "PATH", SERVE, KIND_TEXT, FIELD(python), 0, 0, "/usr/bin/python3", NULL,
	 "interpreter for chat templates; needs jinja2", false, NULL},
	{"block-size", "N", MODEL_VERBS, KIND_U32, FIELD(block_size), 1, 256, "16", NULL, "tokens per KV block", false,
	 NULL},
	{"dtype", "TYPE", MODEL_VERBS, KIND_CHOICE, FIELD(dtype), 0, 0, "auto", "auto|float32|float16|bfloat16",
	 "activations: auto, float32, float16, bfloat16 (auto: float32 on CPUs, the model's own on GPUs)", false, NULL},
	{"kv-dtype", "TYPE", MODEL_VERBS, KIND_CHOICE, FIELD(kv_dtype), 0, 0, "auto", "auto|float32|float16|bfloat16|fp8",
	 "KV cache: auto, float32, float16, bfloat16, fp8 (auto: float16 on CPUs, as activations on GPUs)", false, NULL},
	{"load", "HOW", MODEL_VERBS, KIND_CHOICE, FIELD(load_dummy), 0, 0, "weights", "weights|dummy",
	 "dummy: random weights from config.json alone, for benchmarks", false, NULL},
	{"batch-invariant", NULL, SERVE | BENCH, KIND_FLAG, FIELD(batch_invariant), 0, 0, NULL, NULL,
	 "results independent of batching on GPUs too (on CPUs they always are)", false, NULL},
	{"trace", "FILE", SERVE | BENCH, KIND_TEXT, FIELD(trace), 0, 0, NULL, NULL,
	 "write a timeline of every stage, for Perfetto", false, "trace.json"},
	{"dry-run", NULL, SERVE | BENCH, KIND_FLAG, FIELD(dry_run), 0, 0, NULL, NULL,
	 "all checks, then what would be started", false, NULL},
	{"json", NULL, PLAN | BENCH | STATUS, KIND_FLAG, FIELD(json), 0, 0, NULL, NULL, "print JSON", false, NULL},
	{"grid", "TEXT", BENCH, KIND_TEXT, FIELD(bench_grid), 0, 0, "batch=1,4,16 prompt=128,512 output=64 repeat=3", NULL,
	 "what to measure: sequences at once, prompt and output tokens, repetitions", false, NULL},
	{"url", "URL", CHAT | BENCH | STATUS, KIND_TEXT, FIELD(url), 0, 0, NULL, NULL,
	 "a running server (default: http://HOST:PORT)", false, NULL},
	{"temperature", "T", CHAT, KIND_TEXT, FIELD(chat_temperature), 0, 0, NULL, NULL,
	 "0 always answers the same (default: the model's own)", false, "0.7"},
	{"join", "HOST:PORT", WORKER, KIND_TEXT, FIELD(join), 0, 0, NULL, NULL, "the coordinator's control address", false,
	 NULL},
	{"key-file", "FILE", WORKER | SERVE, KIND_TEXT, FIELD(key_file), 0, 0, NULL, NULL,
	 "keys of the pipeline, as written by the launcher", false, NULL},
	{"run-dir", "DIR", ALL, KIND_TEXT, FIELD(run_dir), 0, 0, NULL, NULL, "folder of the pipeline's sockets", true,
	 NULL},
	{"worker-index", "N", ALL, KIND_U32, FIELD(worker_index), 0, OPTIONS_MAX_DEVICES, "0", NULL, "place in --devices",
	 true, NULL},
	{"watch-fd", "N", ALL, KIND_INT, FIELD(watch_fd), -1, 1 << 20, "-1", NULL, "signs of life for the launcher", true,
	 NULL},
	{"launcher-fd", "N", ALL, KIND_INT, FIELD(launcher_fd), -1, 1 << 20, "-1", NULL,
	 "line-wise JSON channel to the launcher", true, NULL},
};
const int option_row_count = sizeof option_rows / sizeof option_rows[0];

static const struct row *row_find(const char *name, size_t len)
{
	for (int i = 0; i < option_row_count; i++)
		if (strlen(option_rows[i].name) == len && !memcmp(option_rows[i].name, name, len))
			return &option_rows[i];
	return NULL;
}

const struct verb *option_verb(const char *name)
{
	for (int i = 0; i < option_verb_count; i++)
		if (!strcmp(option_verbs[i].name, name))
			return &option_verbs[i];
	return NULL;
}

// ---- values ----

static bool parse_number(const char *s, const char *end, double *out)
{
	char copy[64];
	size_t n = (size_t)(end - s);
	if (n == 0 || n >= sizeof copy || !(isdigit((unsigned char)*s) || *s == '.' || *s == '-'))
		return false;
	memcpy(copy, s, n);
	copy[n] = 0;
	char *stop;
	*out = strtod(copy, &stop);
	return *stop == 0 && isfinite(*out) && !strpbrk(copy, "xX");
}

static bool parse_whole(const char *s, const char *end, double low, double high, uint32_t *out)
{
	for (const char *p = s; p < end; p++)
		if (!isdigit((unsigned char)*p))
			return false;
	double v;
	if (!parse_number(s, end, &v) || v < low || v > high)
		return false;
	*out = (uint32_t)v;
	return true;
}

static const char *item_end(const char *s)
{
	const char *c = strchr(s, ',');
	return c ? c : s + strlen(s);
}

static enum status apply_devices(struct options *o, const char *text, const char *origin, struct error *e)
{
	o->devices_auto = !strcmp(text, "auto");
	o->n_devices = 0;
	if (o->devices_auto)
		return STATUS_OK;
	for (const char *s = text;;) {
		const char *end = item_end(s);
		struct option_device d = {OPTION_DEVICE_CPU, 0, 0};
		uint32_t v = 0;
		bool ok;
		if (end - s == 3 && !memcmp(s, "cpu", 3)) {
			ok = true;
		} else if (end - s > 4 && !memcmp(s, "cpu/", 4)) {
			ok = parse_whole(s + 4, end, 1, 256, &v);
			d.threads = (int)v;
		} else if (end - s == 4 && !memcmp(s, "cuda", 4)) {
			d.kind = OPTION_DEVICE_CUDA;
			ok = true;
		} else if (end - s > 5 && !memcmp(s, "cuda:", 5)) {
			d.kind = OPTION_DEVICE_CUDA;
			ok = parse_whole(s + 5, end, 0, 1023, &v);
			d.index = (int)v;
		} else {
			ok = false;
		}
		if (!ok)
			return error_set(e, STATUS_USAGE,
			                 "%s: '%.*s' is not a device: expected cpu, cpu/THREADS (1 to 256) or cuda:INDEX",
			                 origin, (int)(end - s), s);
		if (o->n_devices == OPTIONS_MAX_DEVICES)
			return error_set(e, STATUS_USAGE, "%s: more than %d devices", origin, OPTIONS_MAX_DEVICES);
		o->devices[o->n_devices++] = d;
		if (!*end)
			return STATUS_OK;
		s = end + 1;
	}
}

static enum status apply_layers(struct options *o, const char *text, const char *origin, struct error *e)
{
	o->n_layers = 0;
	if (!strcmp(text, "auto"))
		return STATUS_OK;
	for (const char *s = text;;) {
		const char *end = item_end(s);
		uint32_t v;
		if (o->n_layers == OPTIONS_MAX_DEVICES || !parse_whole(s, end, 0, 1 << 20, &v))
			return error_set(e, STATUS_USAGE, "%s: '%s' is not auto or a list of at most %d layer counts", origin, text,
			                 OPTIONS_MAX_DEVICES);
		o->layers[o->n_layers++] = v;
		if (!*end)
			return STATUS_OK;
		s = end + 1;
	}
}

static bool parse_memory(const char *s, const char *end, struct option_memory *m)
{
	static const struct { const char *unit; double factor; } units[] = {
		{"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}, {"TiB", 1099511627776.0},
		{"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12},
		{"K", 1024.0}, {"M", 1048576.0}, {"G", 1073741824.0}, {"B", 1},
	};
	double factor = 0;
	for (size_t i = 0; i < sizeof units / sizeof units[0] && factor == 0; i++) {
		size_t n = strlen(units[i].unit);
		if ((size_t)(end - s) > n && !memcmp(end - n, units[i].unit, n)) {
			factor = units[i].factor;
			end -= n;
		}
	}
	double v;
	if (!parse_number(s, end, &v) || v <= 0)
		return false;
	if (factor == 0 && v > 1 && v != floor(v))
		return false; // neither a fraction nor bytes
	if (factor == 0 && v <= 1) {
		*m = (struct option_memory){.is_fraction = true, .fraction = v};
		return true;
	}
	v *= factor == 0 ? 1 : factor;
	if (v < 1 || v > 1e18)
		return false;
	*m = (struct option_memory){.bytes = (uint64_t)v};
	return true;
}

static enum status apply_memory(struct options *o, const char *text, const char *origin, struct error *e)
{
	o->n_memory = 0;
	for (const char *s = text;;) {
		const char *end = item_end(s);
		if (o->n_memory == OPTIONS_MAX_DEVICES || !parse_memory(s, end, &o->memory[o->n_memory]))
			return error_set(e, STATUS_USAGE,
			                 "%s: '%.*s' is not a fraction above 0 and up to 1, or a size such as 20GiB", origin,
			                 (int)(end - s), s);
		o->n_memory++;
		if (!*end)
			return STATUS_OK;
		s = end + 1;
	}
}

static bool choice_has(const char *choices, const char *text)
{
	size_t n = strlen(text);
	for (const char *s = choices; n; s = strchr(s, '|') + 1) {
		const char *end = strchr(s, '|');
		if (!end)
			end = s + strlen(s);
		if ((size_t)(end - s) == n && !memcmp(s, text, n))
			return true;
		if (!*end)
			break;
	}
	return false;
}

// origin: "--port", "STAGECOACH_PORT" or "FILE line 3: port".
static enum status row_apply(const struct row *r, struct options *o, const char *text, const char *origin,
                             struct error *e)
{
	char *field = (char *)o + r->offset;
	uint32_t v;
	switch (r->kind) {
	case KIND_U32:
		if (!parse_whole(text, text + strlen(text), r->low, r->high, &v))
			return error_set(e, STATUS_USAGE, "%s: '%s' is not a whole number from %.0f to %.0f", origin, text, r->low,
			                 r->high);
		memcpy(field, &v, sizeof v);
		return STATUS_OK;
	case KIND_INT: {
		double d;
		if (!parse_number(text, text + strlen(text), &d) || d != floor(d) || d < r->low || d > r->high)
			return error_set(e, STATUS_USAGE, "%s: '%s' is not a whole number from %.0f to %.0f", origin, text, r->low,
			                 r->high);
		int n = (int)d;
		memcpy(field, &n, sizeof n);
		return STATUS_OK;
	}
	case KIND_TEXT:
		if (strlen(text) >= r->size)
			return error_set(e, STATUS_USAGE, "%s: %zu bytes are too long, %zu fit", origin, strlen(text), r->size - 1);
		memcpy(field, text, strlen(text) + 1);
		return STATUS_OK;
	case KIND_FLAG:
	case KIND_ON_OFF: {
		bool on = !strcmp(text, "on") || !strcmp(text, "true") || !strcmp(text, "1");
		if (!on && strcmp(text, "off") && strcmp(text, "false") && strcmp(text, "0"))
			return error_set(e, STATUS_USAGE, "%s: '%s' is neither on nor off", origin, text);
		memcpy(field, &on, sizeof on);
		return STATUS_OK;
	}
	case KIND_CHOICE:
		if (!choice_has(r->choices, text))
			return error_set(e, STATUS_USAGE, "%s: '%s' is not one of %s", origin, text, r->choices);
		if (r->offset == offsetof(struct options, load_dummy))
			o->load_dummy = !strcmp(text, "dummy");
		else
			memcpy(field, text, strlen(text) + 1);
		return STATUS_OK;
	case KIND_DEVICES:
		return apply_devices(o, text, origin, e);
	case KIND_LAYERS:
		return apply_layers(o, text, origin, e);
	case KIND_MEMORY:
		return apply_memory(o, text, origin, e);
	case KIND_PLAN_FOR: {
		const char *c = strchr(text, ',');
		if (!c || !parse_whole(text, c, 1, 1 << 20, &o->plan_sequences) ||
		    !parse_whole(c + 1, text + strlen(text), 1, 1 << 30, &o->plan_tokens))
			return error_set(e, STATUS_USAGE, "%s: '%s' is not SEQUENCES,TOKENS", origin, text);
		return STATUS_OK;
	}
	}
	return error_set(e, STATUS_USAGE, "%s: no rule for this option", origin);
}

// ---- origins ----

static void env_name(const struct row *r, char *out, size_t size)
{
	snprintf(out, size, "STAGECOACH_%s", r->name);
	for (char *p = out; *p; p++)
		*p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
}

static char *trim(char *s)
{
	while (isspace((unsigned char)*s))
		s++;
	char *end = s + strlen(s);
	while (end > s && isspace((unsigned char)end[-1]))
		*--end = 0;
	return s;
}

static enum status apply_config(struct options *o, unsigned verb, const char *path, struct error *e)
{
	FILE *f = fopen(path, "r");
	if (!f)
		return error_set(e, STATUS_USAGE, "--config: %s: %s", path, strerror(errno));
	char line[8192];
	enum status status = STATUS_OK;
	for (int n = 1; status == STATUS_OK && fgets(line, sizeof line, f); n++) {
		if (!strchr(line, '\n') && !feof(f)) {
			status = error_set(e, STATUS_USAGE, "%s line %d: longer than %zu bytes", path, n, sizeof line - 2);
			break;
		}
		char *s = trim(line);
		if (!*s || *s == '#')
			continue;
		char *eq = strchr(s, '=');
		if (!eq) {
			status = error_set(e, STATUS_USAGE, "%s line %d: expected `option = value`, found '%.100s'", path, n, s);
			break;
		}
		*eq = 0;
		char *name = trim(s), *value = trim(eq + 1);
		const struct row *r = row_find(name, strlen(name));
		if (!r || r->internal || r->offset == offsetof(struct options, config)) {
			status = error_set(e, STATUS_USAGE, "%s line %d: unknown option '%.100s'", path, n, name);
			break;
		}
		if (!(r->verbs & verb)) // one file serves all verbs
			continue;
		char origin[4200];
		snprintf(origin, sizeof origin, "%s line %d: %s", path, n, name);
		status = row_apply(r, o, value, origin, e);
	}
	fclose(f);
	return status;
}

static enum status apply_environment(struct options *o, unsigned verb, struct error *e)
{
	for (int i = 0; i < option_row_count; i++) {
		if (option_rows[i].internal || !(option_rows[i].verbs & verb))
			continue;
		char name[64];
		env_name(&option_rows[i], name, sizeof name);
		const char *value = getenv(name);
		if (value && *value)
			TRY(row_apply(&option_rows[i], o, value, name, e));
	}
	return STATUS_OK;
}

// One pass over argv. only_config: looks for --config alone, since the file ranks below the rest.
static enum status apply_arguments(struct options *o, const struct verb *verb, int argc, char **argv, bool only_config,
                                   struct error *e)
{
	bool have_model = false;
	for (int i = 1; i < argc; i++) {
		char *a = argv[i];
		if (strncmp(a, "--", 2)) {
			if (only_config)
				continue;
			if (!verb->takes_model || have_model)
				return error_set(e, STATUS_USAGE, "unexpected argument '%s'", a);
			if (strlen(a) >= sizeof o->model)
				return error_set(e, STATUS_USAGE, "MODEL is longer than %zu bytes", sizeof o->model - 1);
			memcpy(o->model, a, strlen(a) + 1);
			have_model = true;
			continue;
		}
		char *eq = strchr(a, '=');
		size_t len = eq ? (size_t)(eq - a - 2) : strlen(a + 2);
		const struct row *r = row_find(a + 2, len);
		if (!r)
			return error_set(e, STATUS_USAGE, "unknown option '%.*s' (see `stagecoach %s --help`)", (int)(len + 2), a,
			                 verb->name);
		if (!(r->verbs & verb->bit))
			return error_set(e, STATUS_USAGE, "option --%s does not belong to `%s`", r->name, verb->name);
		const char *value = eq ? eq + 1 : NULL;
		if (!value && r->kind == KIND_FLAG)
			value = "on";
		if (!value) {
			if (i + 1 >= argc)
				return error_set(e, STATUS_USAGE, "--%s needs a value: %s", r->name, r->value);
			value = argv[++i];
		}
		if (only_config && r->offset != offsetof(struct options, config))
			continue;
		char origin[64];
		snprintf(origin, sizeof origin, "--%s", r->name);
		TRY(row_apply(r, o, value, origin, e));
	}
	return STATUS_OK;
}

#define URL_CHARACTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~:/[]"

// ADDRESS, ADDRESS:PORT or ADDRESS:PORT-PORT, on loopback: hidden states have no keys.
static enum status check_data_address(const char *text, struct error *e)
{
	const char *colon = strchr(text, ':'), *end = text + strlen(text), *dash = colon ? strchr(colon, '-') : NULL;
	uint32_t low = 0, high = 65535;
	bool ok = !colon || (colon > text && parse_whole(colon + 1, dash ? dash : end, 1, 65535, &low));
	if (!ok || (dash && (!parse_whole(dash + 1, end, 1, 65535, &high) || high < low)))
		return error_set(e, STATUS_USAGE, "--data-address: '%s' is not ADDRESS, ADDRESS:PORT or ADDRESS:PORT-PORT",
		                 text);
	if (strncmp(text, "127.", 4))
		return error_set(e, STATUS_UNAVAILABLE,
		                 "--data-address %s is not a loopback address (127.x.y.z): hidden states travel on "
		                 "loopback only until their transport has keys", text);
	return STATUS_OK;
}

static enum status check_together(const struct options *o, const struct verb *verb, struct error *e)
{
	if (verb->takes_model && !o->model[0] && !(verb->bit == BENCH && o->url[0]))
		return error_set(e, STATUS_USAGE, "`%s` needs a MODEL: a .gguf file, a folder, or org/name", verb->name);
#ifndef STAGECOACH_HAVE_CUDA
	for (int i = 0; i < o->n_devices; i++)
		if (o->devices[i].kind == OPTION_DEVICE_CUDA)
			return error_set(e, STATUS_UNAVAILABLE, "--devices cuda:%d: this build has no GPU workers",
			                 o->devices[i].index);
	if (o->batch_invariant)
		return error_set(e, STATUS_UNAVAILABLE,
		                 "--batch-invariant concerns GPU workers, which this build does not have; "
		                 "on CPUs results never depend on batching");
#endif
	if (!o->devices_auto && o->n_memory > 1 && o->n_memory != o->n_devices)
		return error_set(e, STATUS_USAGE, "--memory gives %d values for %d devices", o->n_memory, o->n_devices);
	if (!o->tls_cert[0] != !o->tls_key[0])
		return error_set(e, STATUS_USAGE, "--tls-cert and --tls-key go together");
	bool loopback = !strncmp(o->host, "127.", 4) || !strcmp(o->host, "localhost") || !strcmp(o->host, "::1");
	if (verb->bit == SERVE && !loopback && !o->api_key_file[0] && !o->no_auth)
		return error_set(e, STATUS_USAGE,
		                 "--host %s is beyond loopback: give --api-key-file, or --no-auth to serve everyone", o->host);
	if (verb->bit == WORKER && !o->join[0] && !o->run_dir[0])
		return error_set(e, STATUS_USAGE, "`worker` needs --join HOST:PORT");
	const char *origin = o->cors_origin;
	if (origin[0] && strcmp(origin, "*") &&
	    (strncmp(origin, "http", 4) || !strstr(origin, "://") ||
	     strspn(origin + 4, URL_CHARACTERS) != strlen(origin + 4)))
		return error_set(e, STATUS_USAGE, "--cors-origin: '%s' is neither * nor one origin such as https://example.org",
		                 origin);
	if (o->data_address[0])
		TRY(check_data_address(o->data_address, e));
	if (verb->bit == SERVE && o->key_file[0] && !o->listen[0])
		return error_set(e, STATUS_USAGE, "--key-file holds the keys of --listen HOST:PORT, which is not given");
	if (verb->bit == WORKER && o->join[0] && !strchr(o->join, ':'))
		return error_set(e, STATUS_USAGE, "--join: '%s' is not HOST:PORT", o->join);
	if (o->expect && !o->listen[0])
		return error_set(e, STATUS_USAGE, "--expect %u needs --listen HOST:PORT", o->expect);
	return STATUS_OK;
}

enum status options_parse(struct options *o, int argc, char **argv, struct error *e)
{
	memset(o, 0, sizeof *o);
	if (argc < 1)
		return error_set(e, STATUS_USAGE, "expected a verb: serve, plan, bench, chat, worker, status or stop");
	if (!strcmp(argv[0], "--help") || !strcmp(argv[0], "-h") || !strcmp(argv[0], "help")) {
		options_print_help(NULL, stdout);
		return STATUS_OK;
	}
	if (!strcmp(argv[0], "--version")) {
#ifdef STAGECOACH_HAVE_CUDA
		puts("stagecoach " STAGECOACH_VERSION ", cuda: yes");
#else
		puts("stagecoach " STAGECOACH_VERSION ", cuda: no");
#endif
		return STATUS_OK;
	}
	if (!strcmp(argv[0], "--sample-config")) {
		options_print_sample_config(stdout);
		return STATUS_OK;
	}
	const struct verb *verb = option_verb(argv[0]);
	if (!verb)
		return error_set(e, STATUS_USAGE,
		                 "unknown verb '%s': expected serve, plan, bench, chat, worker, status or stop", argv[0]);
	for (int i = 1; i < argc; i++)
		if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
			options_print_help(verb->name, stdout);
			return STATUS_OK;
		}
	for (int i = 0; i < option_row_count; i++)
		if (option_rows[i].preset && option_rows[i].kind == KIND_U32 && !strcmp(option_rows[i].preset, "0"))
			continue; // 0 stands for "by context" and need not lie in the range
		else if (option_rows[i].preset)
			TRY(row_apply(&option_rows[i], o, option_rows[i].preset, option_rows[i].name, e));
	snprintf(o->verb, sizeof o->verb, "%s", verb->name);
	const char *config = getenv("STAGECOACH_CONFIG");
	if (config && *config)
		TRY(row_apply(row_find("config", 6), o, config, "STAGECOACH_CONFIG", e));
	TRY(apply_arguments(o, verb, argc, argv, true, e));
	if (o->config[0])
		TRY(apply_config(o, verb->bit, o->config, e));
	TRY(apply_environment(o, verb->bit, e));
	TRY(apply_arguments(o, verb, argc, argv, false, e));
	return check_together(o, verb, e);
}
