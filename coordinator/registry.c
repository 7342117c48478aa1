// See registry.h.
#include "coordinator/registry.h"

#include <stdio.h>
#include <string.h>

void registry_init(struct registry *r, uint32_t n_workers, uint32_t n_local)
{
	ASSERT(n_workers >= 1 && n_workers <= MAX_STAGES && n_local <= n_workers);
	memset(r, 0, sizeof *r);
	r->n_workers = n_workers;
	r->n_local = n_local;
	for (uint32_t i = 0; i < n_workers; i++)
		snprintf(r->labels[i], sizeof r->labels[i], "stage %u", i);
}

struct registry_worker *registry_find(struct registry *r, const struct hub_peer *peer)
{
	for (uint32_t i = 0; i < r->n_workers; i++)
		if (r->workers[i].connected && hub_peer_equal(&r->workers[i].peer, peer))
			return &r->workers[i];
	return NULL;
}

uint32_t registry_index(const struct registry *r, const struct registry_worker *w)
{
	return (uint32_t)(w - r->workers);
}

// A worker of another host gets its former place, else the first that was never taken, else one whose process is gone.
static bool place_of_remote(const struct registry *r, const struct message_hello *h, uint32_t *index)
{
	for (int pass = 0; pass < 3; pass++)
		for (uint32_t i = r->n_local; i < r->n_workers; i++) {
			const struct registry_worker *w = &r->workers[i];
			bool same = w->hello.protocol_version && !strcmp(w->hello.host, h->host) && w->hello.worker_index == h->worker_index;
			if (pass == 0 ? same : pass == 1 ? !w->hello.protocol_version : !w->connected) {
				*index = i;
				return true;
			}
		}
	return false;
}

enum status registry_hello(struct registry *r, const struct hub_peer *peer, const struct message_hello *h, uint32_t *index,
                           struct error *e)
{
	bool local = peer->door == 0;
	*index = h->worker_index;
	if (local && h->worker_index >= r->n_local)
		return error_set(e, STATUS_INVALID, "worker %u of host %s: expected 0 to %u", h->worker_index, h->host, r->n_local - 1);
	if (!local && !place_of_remote(r, h, index))
		return error_set(e, STATUS_INVALID, "worker %u of host %s: %u workers of other hosts are expected and here", h->worker_index,
		                 h->host, r->n_workers - r->n_local);
	struct registry_worker *w = &r->workers[*index];
	double busy_s = w->busy_before_s + (double)w->heartbeat.busy_us * 1e-6;
	double wait_s = w->wait_before_s + (double)w->heartbeat.wait_us * 1e-6;
	struct message_assign assign = w->assign; // a successor gets the same stage
	memset(w, 0, sizeof *w);
	w->assign = assign;
	w->connected = true;
	w->local = local;
	w->peer = *peer;
	w->hello = *h;
	w->busy_before_s = busy_s;
	w->wait_before_s = wait_s;
	char device[32];
	if (h->device_kind == DEVICE_CUDA)
		snprintf(device, sizeof device, "cuda:%u", h->device_index);
	else
		snprintf(device, sizeof device, "cpu");
	snprintf(r->labels[*index], sizeof r->labels[*index], "stage %u (%s on %.48s)", *index, device, h->host);
	return STATUS_OK;
}

void registry_forget(struct registry *r, uint32_t index)
{
	struct registry_worker *w = &r->workers[index];
	w->connected = false;
	w->has_budget = false;
}

void registry_ban(struct registry *r, const struct hub_peer *peer)
{
	r->banned[r->next_banned++ % REGISTRY_MAX_BANNED] = *peer;
}

bool registry_is_banned(const struct registry *r, const struct hub_peer *peer)
{
	for (uint32_t i = 0; i < REGISTRY_MAX_BANNED && i < r->next_banned; i++)
		if (hub_peer_equal(&r->banned[i], peer))
			return true;
	return false;
}
