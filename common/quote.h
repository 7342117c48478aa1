// Names and values out of foreign files, made fit for one line of a message.
#ifndef STAGECOACH_COMMON_QUOTE_H
#define STAGECOACH_COMMON_QUOTE_H

#include <stddef.h>

// Copies data[0..len) into buf as printable ASCII ('?' for every other byte), cut off with "..." where it is too long.
// Returns buf. cap is at least 4.
const char *quote_bytes(char *buf, size_t cap, const char *data, size_t len);

#endif
