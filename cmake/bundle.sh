#!/bin/sh
# bundle.sh SOURCE BUILD VERSION: a relocatable tarball BUILD/stagecoach-VERSION-ARCH.tar.gz. The surprising decision: the
# libraries that it carries are found by asking the dynamic linker what the programs use, and all but the ones that every
# system has (glibc, libgcc, libstdc++) or that must be the host's own (driver, cuBLAS, NCCL) are copied.
set -eu
source=$1 build=$2 version=$3
name=stagecoach-$version-$(uname -m)
out=$build/bundle/$name
rm -rf "$build/bundle"
mkdir -p "$out/bin" "$out/lib" "$out/deploy" "$out/python" "$out/tests/bin" "$out/share"
cp "$build"/bin/stagecoach-coordinator "$build"/bin/stagecoach-worker "$build"/bin/chat_template_helper.py "$out/bin/"
find "$source/deploy" -maxdepth 1 -type f ! -name quickstart ! -name setup.sh -exec cp {} "$out/deploy/" \;
cp "$source/LICENSE" "$source/README.md" "$out/share/"
for t in "$build"/bin/*_test_*; do
  [ ! -x "$t" ] || cp "$t" "$out/tests/bin/"
done
# Tests are run from the bundle's top folder: for t in tests/bin/*; do $t; done
mkdir -p "$out/coordinator"
cp "$source/coordinator/chat_template_helper.py" "$out/coordinator/"
for d in process support golden; do
  [ ! -d "$source/tests/$d" ] || cp -R "$source/tests/$d" "$out/tests/"
done
# The template helper needs jinja2; the copy is used where the interpreter has none of its own.
for p in jinja2 markupsafe; do
  cp -R "$(/usr/bin/python3 -c "import os, $p; print(os.path.dirname($p.__file__))")" "$out/python/"
done
find "$out/python" "$out/tests" -name __pycache__ -prune -exec rm -rf {} +
find "$out/python" -name '*.so' -delete   # markupsafe has the same in Python
find "$out/bin" "$out/tests/bin" -type f | xargs ldd 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libpthread|libdl|librt|libresolv|libutil|libgcc_s|libstdc\+\+|libcuda|libcudart|libcublas|libcublasLt|libnccl)\.so' |
  while read -r lib; do
    cp -L "$lib" "$out/lib/"
    # Their licences go along, as the distribution states them.
    package=$(dpkg-query -S "$(realpath "$lib")" 2>/dev/null | head -n 1 | cut -d: -f1)
    [ -z "$package" ] || { mkdir -p "$out/share/licences/$package"; cp -L "/usr/share/doc/$package/copyright" "$out/share/licences/$package/"; }
  done
for p in python3-jinja2 python3-markupsafe; do
  mkdir -p "$out/share/licences/$p"
  cp -L "/usr/share/doc/$p/copyright" "$out/share/licences/$p/"
done
tar -C "$build/bundle" -czf "$build/$name.tar.gz" "$name"
echo "$build/$name.tar.gz ($(du -h "$build/$name.tar.gz" | cut -f1))"
