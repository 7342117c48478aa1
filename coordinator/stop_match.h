// Stop strings over text that arrives in pieces. Whatever could still become a stop string is held back, so that
// nothing of one is ever given out and nothing else is lost. The surprising decision: one Knuth-Morris-Pratt automaton
// per stop string, stepped byte by byte, so that the result does not depend on how the text was cut into pieces; the
// match that ends first counts, and among those that end together the one that begins first.
#ifndef STAGECOACH_COORDINATOR_STOP_MATCH_H
#define STAGECOACH_COORDINATOR_STOP_MATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "coordinator/json_write.h"

enum { STOP_MAX_STRINGS = 64, STOP_MAX_BYTES = 4096 }; // per request; of one string

struct stop_set; // the stop strings of a request, shared by its choices; immutable
// Strings are copied; each is 1 to STOP_MAX_BYTES bytes, count 1 to STOP_MAX_STRINGS.
struct stop_set *stop_set_create(const char *const *strings, const size_t *lens, unsigned count);
void stop_set_destroy(struct stop_set **);

struct stop_matcher {
	const struct stop_set *set; // NULL: nothing ever matches
	uint32_t *matched;	    // [strings] bytes of each string that the end of the text matches
	struct json_buf held;	    // the end of the text, not given out yet
};
void stop_matcher_init(struct stop_matcher *, const struct stop_set *);
void stop_matcher_free(struct stop_matcher *);
// Takes more text; appends to out what is certain. Returns -1, or the index of the stop string that was found: out then
// ends before it (after it if keep_stop), what follows it is dropped, and nothing may be pushed any more.
int stop_matcher_push(struct stop_matcher *, const char *text, size_t len, bool keep_stop, struct json_buf *out);
// The text ended: what is held back is appended to out.
void stop_matcher_finish(struct stop_matcher *, struct json_buf *out);

#endif
