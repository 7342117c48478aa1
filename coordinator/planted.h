// Faults that the simulation has to find. The surprising decision: they stand in the code they break, since a fault
// that is patched in from outside rots unseen; outside the one test that defines STAGECOACH_PLANTED_FAULTS each is the
// constant false and leaves no trace in the program.
#ifndef STAGECOACH_COORDINATOR_PLANTED_H
#define STAGECOACH_COORDINATOR_PLANTED_H

#include <stdbool.h>

// What goes wrong. X-macro, so that the test can name each.
#define PLANTED_FAULTS(X)                                                                                              \
	X(WHOLE_PROMPT_CACHED)  /* the last prompt token comes from the cache too and is never computed */             \
	X(PUBLISHED_UNCOMPUTED) /* a block can be found before a step that fills it was given */                       \
	X(SALT_IGNORED)         /* tenants share blocks */                                                             \
	X(SCOPE_IGNORED)        /* without the prefix cache, requests share blocks all the same */                     \
	X(PARENT_IGNORED)       /* equal blocks after different beginnings are taken for the same */                   \
	X(STAYS_PUBLISHED)      /* a block that was given away can still be found */                                   \
	X(SHARED_NOT_HELD)      /* a shared block is free once its first holder ends */                                \
	X(CACHED_COUNTED_FREE)  /* free cached blocks count as free beside being used */                               \
	X(BLOCK_LOST)           /* the last block of a sequence that ends is never free again */                       \
	X(END_NOT_TOLD)         /* workers do not hear of an end while steps are in flight */                          \
	X(REFERENCE_NOT_MOVED)  /* after a token arrived, the next row still names it */                               \
	X(AHEAD_ANYWAY)         /* a sequence that must not be scheduled ahead is */                                   \
	X(BEYOND_MAX_TOKENS)    /* a row more than max_tokens allows */                                                \
	X(DRAINED_TOKENS_LOST)  /* tokens of a preempted sequence that were in flight are dropped */                   \
	X(TOKEN_AFTER_END)      /* a thrown-away token is delivered */                                                 \
	X(SHORT_HISTORY)        /* penalties see the prompt only */                                                    \
	X(CHOICES_ALIKE)        /* every choice draws like the first */                                                \
	X(ENDS_KEPT_OVER_EPOCH) /* a new epoch begins with ends of the old one */                                      \
	X(STALE_RESULT_TAKEN)   /* a result of an older epoch is taken for one of this */                              \
	X(REPLAY_FORGETS)       /* a new epoch replays the prompt without what was delivered */

enum planted_fault {
	PLANTED_NONE,
#define PLANTED_ENUM(name) PLANTED_##name,
	PLANTED_FAULTS(PLANTED_ENUM)
#undef PLANTED_ENUM
	PLANTED_COUNT,
};

#ifdef STAGECOACH_PLANTED_FAULTS
extern enum planted_fault planted_fault;
#define PLANTED(name) (planted_fault == PLANTED_##name)
#else
#define PLANTED(name) false
#endif

#endif
