// The table of transports; the first row that can join two devices at an address is used.
#include "worker/transport.h"

static const struct transport *const transports[] = {
	&transport_socket,
};

const struct transport *transport_find(enum device_kind from, enum device_kind to, const char *address)
{
	for (size_t i = 0; i < sizeof transports / sizeof *transports; i++)
		if (transports[i]->can_join(from, to, address))
			return transports[i];
	return NULL;
}
