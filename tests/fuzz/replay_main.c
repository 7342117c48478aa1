// Replays a folder of inputs (or single files) through a fuzz target, so that the corpus is a test where libFuzzer is
// not in use. Fails if there is no input at all.
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
	FILE *f = fopen(path, "rb");
	if (!f)
		return 0;
	fseek(f, 0, SEEK_END);
	long n = ftell(f);
	rewind(f);
	uint8_t *data = n > 0 ? malloc((size_t)n) : NULL;
	size_t got = data ? fread(data, 1, (size_t)n, f) : 0;
	fclose(f);
	LLVMFuzzerTestOneInput(data, got);
	free(data);
	return 1;
}

int main(int argc, char **argv)
{
	int count = 0;
	for (int i = 1; i < argc; i++) {
		DIR *d = opendir(argv[i]);
		if (!d) {
			count += replay_file(argv[i]);
			continue;
		}
		for (struct dirent *e; (e = readdir(d));) {
			char path[4096];
			if (e->d_name[0] == '.')
				continue;
			snprintf(path, sizeof path, "%s/%s", argv[i], e->d_name);
			count += replay_file(path);
		}
		closedir(d);
	}
	printf("%d inputs replayed\n", count);
	return count > 0 ? 0 : 1;
}
