#!/usr/bin/env bash
# What `./dev demo-python` runs after the build: trains with train_gpt.py on a PyTorch that is there, or installs
# one with matplotlib.
#
#     client/python/examples/demo.sh [OPTIONS OF train_gpt.py]
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
export ATTND_CLIENT_LIBRARY="$PWD/.build/python/native/libattnd_client-attnd0.so" PYTHONPATH="$PWD/client/python"
exec "$python" client/python/examples/train_gpt.py --daemon bazel-bin/server/attnd --kill-at 150 --plot dist/loss.png "$@"
