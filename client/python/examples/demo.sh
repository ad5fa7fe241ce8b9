#!/usr/bin/env bash
# What `./dev demo-python` and `./dev demo-modules` run after the build: a training program of this folder on a PyTorch
# that is there, or on one that it installs with matplotlib.
#
#     client/python/examples/demo.sh PROGRAM [ITS OPTIONS]
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../../.."

has_torch() { "$1" -c 'import torch, numpy' 2>/dev/null; }

python=
for candidate in "${ATTND_PYTHON:-}" python3 .deps/python/bin/python; do
  if [ -n "$candidate" ] && has_torch "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "demo.sh: installing PyTorch with pip into .deps/python (several gigabytes)" >&2
  python3 -m venv .deps/python
  quiet=-q
  [ ! -t 2 ] || quiet=  # shows its progress
  .deps/python/bin/pip install $quiet --disable-pip-version-check torch numpy matplotlib
  python=.deps/python/bin/python
fi

"$python" client/python/build_native.py bazel-bin/client/c/libattnd_client.so .build/python/native
mkdir -p dist
export ATTND_CLIENT_LIBRARY="$PWD/.build/python/native/libattnd_client-attnd0.so"
export PYTHONPATH="$PWD/client/python${PYTHONPATH:+:$PYTHONPATH}"
program=$1
shift
exec "$python" "client/python/examples/$program" --daemon bazel-bin/server/attnd "$@"
