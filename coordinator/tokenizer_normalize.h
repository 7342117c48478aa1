// Canonical normalisation (NFC and NFD) as `tokenizers` does it, from the generated table. The surprising decision:
// utf8proc is not used, since its Unicode version is another than the reference's.
#ifndef STAGECOACH_COORDINATOR_TOKENIZER_NORMALIZE_H
#define STAGECOACH_COORDINATOR_TOKENIZER_NORMALIZE_H

#include <stddef.h>
#include <stdint.h>

enum normal_form { NORMAL_FORM_D, NORMAL_FORM_C };

// Normalises valid UTF-8. NULL if the text is surely normal as it is (the caller goes on with its own), else a
// malloc'ed text of *out_len bytes.
uint8_t *unicode_normalize(const uint8_t *text, size_t len, enum normal_form, size_t *out_len);

#endif
