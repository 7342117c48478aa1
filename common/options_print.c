// Options as JSON for the launcher, as help and as a sample config file, all from the table in options.c.
#include <stdlib.h>
#include <string.h>

#include "common/options.h"
#include "common/options_table.h"

static void print_json_text(const char *s, FILE *f)
{
	fputc('"', f);
	for (; *s; s++) {
		unsigned char c = (unsigned char)*s;
		if (c == '"' || c == '\\')
			fprintf(f, "\\%c", c);
		else if (c < 0x20)
			fprintf(f, "\\u%04x", c);
		else
			fputc(c, f);
	}
	fputc('"', f);
}

void options_print_json(const struct options *o, FILE *f)
{
	fprintf(f, "{\"verb\":\"%s\",\"model\":", o->verb);
	print_json_text(o->model, f);
	for (int i = 0; i < option_row_count; i++) {
		const struct row *r = &option_rows[i];
		const char *field = (const char *)o + r->offset;
		fprintf(f, ",\"%s\":", r->name);
		switch (r->kind) {
		case KIND_U32: fprintf(f, "%u", *(const uint32_t *)field); break;
		case KIND_INT: fprintf(f, "%d", *(const int *)field); break;
		case KIND_TEXT: print_json_text(field, f); break;
		case KIND_CHOICE:
			if (r->offset == offsetof(struct options, load_dummy))
				fprintf(f, "\"%s\"", o->load_dummy ? "dummy" : "weights");
			else
				print_json_text(field, f);
			break;
		case KIND_FLAG:
		case KIND_ON_OFF: fputs(*(const bool *)field ? "true" : "false", f); break;
		case KIND_DEVICES:
			if (o->devices_auto) {
				fputs("\"auto\"", f);
				break;
			}
			fputc('[', f);
			for (int d = 0; d < o->n_devices; d++)
				fprintf(f, "%s{\"kind\":\"%s\",\"index\":%d,\"threads\":%d}", d ? "," : "",
				        o->devices[d].kind == OPTION_DEVICE_CPU ? "cpu" : "cuda", o->devices[d].index, o->devices[d].threads);
			fputc(']', f);
			break;
		case KIND_LAYERS:
			fputc('[', f);
			for (int d = 0; d < o->n_layers; d++)
				fprintf(f, "%s%u", d ? "," : "", o->layers[d]);
			fputc(']', f);
			break;
		case KIND_MEMORY:
			fputc('[', f);
			for (int d = 0; d < o->n_memory; d++) {
				if (o->memory[d].is_fraction)
					fprintf(f, "%s{\"fraction\":%.9g}", d ? "," : "", o->memory[d].fraction);
				else
					fprintf(f, "%s{\"bytes\":%llu}", d ? "," : "", (unsigned long long)o->memory[d].bytes);
			}
			fputc(']', f);
			break;
		case KIND_PLAN_FOR: fprintf(f, "[%u,%u]", o->plan_sequences, o->plan_tokens); break;
		}
	}
	fputs("}\n", f);
}

void options_print_help(const char *verb_name, FILE *f)
{
	const struct verb *verb = verb_name ? option_verb(verb_name) : NULL;
	if (!verb) {
		fputs("usage: stagecoach VERB [MODEL] [OPTIONS]\n\n", f);
		for (int i = 0; i < option_verb_count; i++)
			fprintf(f, "  %-8s%-7s%s\n", option_verbs[i].name, option_verbs[i].takes_model ? "MODEL" : "", option_verbs[i].help);
		fputs("\n`stagecoach VERB --help` lists the options of a verb; `stagecoach --sample-config` prints a config file.\n"
		      "MODEL is a .gguf file, a folder with config.json and *.safetensors, or org/name in the local Hugging Face cache.\n", f);
		return;
	}
	fprintf(f, "usage: stagecoach %s %s[OPTIONS]\n%s\n\n", verb->name, verb->takes_model ? "MODEL " : "", verb->help);
	for (int i = 0; i < option_row_count; i++) {
		const struct row *r = &option_rows[i];
		if (r->internal || !(r->verbs & verb->bit))
			continue;
		char left[64];
		snprintf(left, sizeof left, "--%s %s", r->name, r->value ? r->value : "");
		fprintf(f, "  %-32s %s", left, r->help);
		if (r->preset && strcmp(r->preset, "0"))
			fprintf(f, " [%s]", r->preset);
		fputc('\n', f);
	}
	fputs("\nEach option is also an environment variable (--max-seqs: STAGECOACH_MAX_SEQS) and a line in a --config file.\n"
	      "The command line beats the environment, the environment beats the file.\n", f);
}

void options_print_sample_config(FILE *f)
{
	fputs("# Stagecoach options, one a line: option = value. Lines for other verbs than the one in use are passed over.\n", f);
	for (int i = 0; i < option_row_count; i++) {
		const struct row *r = &option_rows[i];
		if (r->internal || !strcmp(r->name, "config"))
			continue;
		const char *value = r->sample ? r->sample : r->preset ? r->preset : r->kind == KIND_FLAG ? "off" : "";
		fprintf(f, "\n# %s\n# %s = %s\n", r->help, r->name, value);
	}
}
