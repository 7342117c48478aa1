// What others see of the engine: engine_info, brought up to date by the engine thread. The surprising decision: while steps
// flow it is at most so old as PUBLISH_US says, because copying it after each step would cost more than the step's own
// scheduling; changes of state are published at once.
#include <string.h>

#include "coordinator/engine_internal.h"

static void publish_stages(struct engine *e, struct engine_info *info, bool *fresh)
{
	uint64_t now = engine_now_us();
	*fresh = true;
	for (uint32_t i = 0; i < e->registry.n_workers; i++) {
		const struct registry_worker *w = &e->registry.workers[i];
		struct engine_stage_info *s = &info->stage[i];
		memcpy(s->label, e->registry.labels[i], sizeof s->label);
		memcpy(s->device_name, w->hello.device_name, sizeof s->device_name);
		s->pid = w->hello.pid;
		s->first_layer = e->plan.stage[i].first_layer;
		s->n_layers = e->plan.stage[i].n_layers;
		s->weight_bytes = w->budget.weight_bytes;
		s->kv_bytes = w->budget.kv_bytes;
		s->workspace_bytes = w->budget.workspace_bytes;
		s->rss_bytes = w->heartbeat.rss_bytes;
		s->busy_s = w->busy_before_s + (double)w->heartbeat.busy_us * 1e-6;
		s->wait_s = w->wait_before_s + (double)w->heartbeat.wait_us * 1e-6;
		s->last_step = w->heartbeat.last_step_done;
		s->alive = w->connected && recovery_alive(e->recovery, i);
		s->load_fraction = w->has_budget ? 1 : w->total_bytes ? (double)w->done_bytes / (double)w->total_bytes : 0;
		*fresh &= s->alive && w->heartbeat_us + FRESH_US > now;
	}
}

static enum engine_state state_of(const struct engine *e)
{
	if (e->failed)
		return ENGINE_FAILED;
	if (e->ended)
		return ENGINE_ENDED;
	if (e->drain)
		return ENGINE_DRAINING;
	if (!e->first_ready_us)
		return ENGINE_STARTING;
	return recovery_running(e->recovery) ? ENGINE_READY : ENGINE_RECOVERING;
}

void engine_publish(struct engine *e)
{
	uint64_t now = engine_now_us();
	if (!e->publish_now && now < e->next_publish_us)
		return;
	e->publish_now = false;
	e->next_publish_us = now + PUBLISH_US;
	bool fresh;
	pthread_mutex_lock(&e->lock);
	struct engine_info *info = &e->info;
	enum engine_state before = info->state;
	publish_stages(e, info, &fresh);
	info->state = state_of(e);
	info->healthy = !e->failed;
	info->ready = info->state == ENGINE_READY && fresh;
	info->epoch = e->epoch;
	info->n_stages = e->registry.n_workers;
	info->max_context = e->max_context;
	info->n_blocks = e->n_blocks[0];
	info->recoveries = e->recoveries;
	if (e->planned)
		info->plan = e->plan;
	if (e->scheduler)
		scheduler_get_stats(e->scheduler, &info->stats);
	if (info->state != before)
		pthread_cond_broadcast(&e->changed);
	pthread_mutex_unlock(&e->lock);
}
