#include "common/model_parts.h"
enum status model_open_folder(struct model *m, const char *path, bool dummy, struct error *e)
{
	return error_set(e, STATUS_REFUSED, "%s: folders are not read yet", path);
}
