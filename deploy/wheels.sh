#!/usr/bin/env bash
# Makes the wheels of client and daemon from bazel-bin, and the sdist from git's HEAD where there is one. Called by
# `./dev wheel` and release.sh.
#
#     deploy/wheels.sh FOLDER
set -euo pipefail
[ $# = 1 ] || { sed -n '2,5s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
output=$(readlink -f "$1")
cd "$(dirname "$(readlink -f "$0")")/.."
build() { /usr/bin/python3 -B client/python/build_wheel.py "$@" "$output"; }

build client bazel-bin/client/c/libattnd_client.so bazel-bin/client/attnctl
build server bazel-bin/server/attnd
! git rev-parse -q --verify HEAD >/dev/null ||
  /usr/bin/python3 -B client/python/build_sdist.py "$output"/attnd-*.whl "$output"
