// A plan for people and, as JSON, for programs.
#ifndef STAGECOACH_COORDINATOR_PLAN_PRINT_H
#define STAGECOACH_COORDINATOR_PLAN_PRINT_H

#include "coordinator/engine.h"

void plan_print(const struct engine_info *, const struct model *, bool json);

#endif
