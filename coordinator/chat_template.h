// Chat messages to prompt text through the model's own Jinja template, rendered by jinja2 in a helper process (foreign
// code: limits on time and memory, killed and replaced when it passes them; its death harms nobody).
#ifndef STAGECOACH_COORDINATOR_CHAT_TEMPLATE_H
#define STAGECOACH_COORDINATOR_CHAT_TEMPLATE_H

#include <stdbool.h>
#include <stddef.h>

#include "common/status.h"
#include "coordinator/tokenizer.h"

struct chat_template;

struct chat_template_options {
	const char *source;      // the Jinja text
	const char *bos_token, *eos_token, *unk_token, *pad_token; // texts, "" if none
	const struct tokenizer *tokenizer; // its control tokens stay text in messages; NULL: all output is the template's
	const char *python;      // interpreter, e.g. /usr/bin/python3
	const char *helper_path; // chat_template_helper.py
	unsigned time_limit_ms;  // per rendering, default 5000
	unsigned long memory_limit_bytes; // default 512 MiB (address space)
};

// Starts the helper, which compiles the template while the caller goes on. STATUS_REFUSED if the interpreter or the
// helper is missing. Everything in the options is copied.
enum status chat_template_create(struct chat_template **out, const struct chat_template_options *, struct error *);
// Waits until the template is compiled: STATUS_REFUSED with jinja2's message if it does not compile, or if jinja2 is
// missing (named). Call it once before saying ready.
enum status chat_template_wait(struct chat_template *, struct error *);
void chat_template_destroy(struct chat_template **); // ends the helper

// messages_json: the request's "messages" array as JSON (content already normalised); extra_json: an object with further
// variables (add_generation_prompt, tools, ...) or NULL. Thread safe (one rendering at a time per helper).
//
// Control-token look-alikes in client text must stay text while those of the template are control tokens. The rendered
// prompt therefore comes as segments for tokenizer_encode_segments(): from_content marks exactly the look-alikes (and
// beginnings and ends of content that could become one with its neighbours); all else, content or not, is one text.
struct chat_rendering { struct text_segment *segments; size_t count; char *storage; };
// STATUS_INVALID: the template raised (its message), or passed its time or memory limit (says which).
enum status chat_template_render(struct chat_template *, const char *messages_json, const char *extra_json,
                                 struct chat_rendering *out, struct error *);
void chat_rendering_free(struct chat_rendering *);

#endif
