// chat_template.h with one fixed template: <|im_start|>ROLE\nCONTENT<|im_end|>\n for each message, then the assistant's
// beginning. A message "RAISE" raises. Included by tests in place of the real one.
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/chat_template.h"

struct chat_template {
	int unused;
};
static struct chat_template fake_chat_template;

static void fake_segment(struct chat_rendering *r, const char *text, bool from_content)
{
	r->segments = realloc(r->segments, (r->count + 1) * sizeof *r->segments);
	r->segments[r->count++] = (struct text_segment){strdup(text), strlen(text), from_content};
}

enum status chat_template_render(struct chat_template *t, const char *messages_json, const char *extra_json,
				 struct chat_rendering *out, struct error *e)
{
	*out = (struct chat_rendering){0};
	json_t *messages = json_loads(messages_json, 0, NULL), *extra = json_loads(extra_json, 0, NULL);
	enum status status = STATUS_OK;
	size_t i;
	json_t *m;
	json_array_foreach(messages, i, m)
	{
		const char *content = json_string_value(json_object_get(m, "content"));
		if (!strcmp(content, "RAISE"))
			status = error_set(e, STATUS_INVALID, "the template raised: roles must alternate");
		fake_segment(out, "<|im_start|>", false);
		fake_segment(out, json_string_value(json_object_get(m, "role")), false);
		fake_segment(out, "\n", false);
		fake_segment(out, content, true);
		fake_segment(out, "<|im_end|>\n", false);
	}
	if (json_is_true(json_object_get(extra, "add_generation_prompt")))
		fake_segment(out, "<|im_start|>assistant\n", false);
	json_decref(messages);
	json_decref(extra);
	if (status != STATUS_OK)
		chat_rendering_free(out);
	return status;
}

void chat_rendering_free(struct chat_rendering *r)
{
	for (size_t i = 0; i < r->count; i++)
		free((char *)r->segments[i].text);
	free(r->segments);
	*r = (struct chat_rendering){0};
}
