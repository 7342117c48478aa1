// The HTTP server: libmicrohttpd for connections, headers and bodies; the API endpoints behind it; streams in front of
// the engine. Threads: libmicrohttpd's own read requests and send whole answers, a few API threads parse, render and
// tokenize, and one stream thread turns tokens into text. The surprising decision: while a stream runs its connection
// stays suspended in libmicrohttpd and the stream thread writes the chunks straight to the socket, one send per
// wake-up, because a suspend and resume per token costs more processor time than everything else together; the same
// thread watches those sockets, since libmicrohttpd does not notice that the client of a suspended connection is gone.
#ifndef STAGECOACH_COORDINATOR_HTTP_H
#define STAGECOACH_COORDINATOR_HTTP_H

#include <stdbool.h>
#include <stdint.h>

#include "common/model.h"
#include "common/status.h"

struct engine;
struct tokenizer;
struct chat_template;
struct http_server;

struct http_options {
	struct engine *engine; // borrowed until http_server_stop(); must be able to answer engine_get_info()
	const struct tokenizer *tokenizer;	   // borrowed
	struct chat_template *chat_template;	   // borrowed; NULL: the model has none and chat completions answer 400
	const struct model_generation *generation; // borrowed; defaults for sampling fields, end tokens, BOS
	const char *served_model_name;		   // id in answers
	const char *host;			   // address or name to listen on; NULL or "": 127.0.0.1
	uint32_t port;				   // 0: any free one, see http_server_address()
	const char *api_key_file;		   // keys, one a line ('#' begins a comment line); NULL or "": none
	bool no_auth;				   // allows a host beyond loopback without keys
	const char *cors_origin;		   // NULL or "": no CORS headers; "*" or one origin
	const char *tls_cert, *tls_key;		   // PEM files, both or neither
	uint32_t slow_client_timeout_s;		   // 0: 60
	uint32_t max_queue;			   // requests that may wait for an API thread; 0: 1024
	uint64_t max_body_bytes;		   // 0: 16 MiB
	uint32_t max_connections;		   // 0: as many as the limit on open files allows
};

// Listens and serves from then on, also while the engine starts (/health, /ready and 503 with Retry-After until then).
// STATUS_UNAVAILABLE: address in use or not of this machine, naming host and port. STATUS_USAGE: key file or
// certificate unreadable or empty, a host beyond loopback without keys.
enum status http_server_start(struct http_server **out, const struct http_options *, struct error *);
// "http://127.0.0.1:8080", with the port really used; borrowed for the server's life.
const char *http_server_address(const struct http_server *);
// drain: refuses new requests with 503, lets running ones finish (as long as the engine does), then closes; otherwise
// running requests are cancelled and their streams end with an error event. Sets *s to NULL; accepts NULL. The engine
// must still be there: call engine_drain() before or beside it, engine_destroy() after it.
void http_server_stop(struct http_server **s, bool drain);

#endif
