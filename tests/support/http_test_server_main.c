// The real HTTP server over the fake engine, for tests from outside: prints its address, serves until its standard
// input ends. Options: key=value words, see main().
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "coordinator/http.h"

#include "fake_chat_template.c"
#include "fake_engine.c"
#include "fake_tokenizer.c"

int main(int argc, char **argv)
{
	struct fake_engine_controls control = {0};
	struct http_options options = {
	    .tokenizer = &fake_tokenizer,
	    .chat_template = &fake_chat_template,
	    .served_model_name = "fake",
	};
	struct {
		const char *name;
		uint32_t *number;
		const char **text;
	} known[] = {
	    {"max_context", &control.max_context, NULL},
	    {"max_queue", &control.max_queue, NULL},
	    {"step_us", &control.step_us, NULL},
	    {"fail_after", &control.fail_after, NULL},
	    {"slow_client_timeout_s", &options.slow_client_timeout_s, NULL},
	    {"port", &options.port, NULL},
	    {"api_key_file", NULL, &options.api_key_file},
	    {"cors_origin", NULL, &options.cors_origin},
	    {"tls_cert", NULL, &options.tls_cert},
	    {"tls_key", NULL, &options.tls_key},
	    {"host", NULL, &options.host},
	};
	for (int i = 1; i < argc; i++) {
		char *value = strchr(argv[i], '=');
		bool found = false;
		for (size_t k = 0; value && k < sizeof known / sizeof known[0]; k++) {
			if (strlen(known[k].name) != (size_t)(value - argv[i]) ||
			    strncmp(known[k].name, argv[i], (size_t)(value - argv[i])))
				continue;
			found = true;
			if (known[k].number)
				*known[k].number = (uint32_t)strtoul(value + 1, NULL, 10);
			else
				*known[k].text = value + 1;
		}
		if (!found) {
			fprintf(stderr, "unknown option %s\n", argv[i]);
			return 2;
		}
	}
	struct error e = {{0}};
	struct http_server *server;
	engine_create(&options.engine, NULL, NULL, &e);
	fake_engine_control(&control);
	enum status status = http_server_start(&server, &options, &e);
	if (status != STATUS_OK) {
		fprintf(stderr, "%s\n", e.text);
		engine_destroy(&options.engine);
		return (int)status;
	}
	printf("%s\n", http_server_address(server));
	fflush(stdout);
	char line[16];
	while (read(0, line, sizeof line) > 0)
		;
	http_server_stop(&server, false);
	engine_destroy(&options.engine);
	return 0;
}
