#!/usr/bin/env bash
# Names git's HEAD vVERSION, unless something is not committed or the name is another commit's. Called by
# `./dev release --tag`.
#
#     deploy/tag.sh VERSION
set -euo pipefail
[ $# = 1 ] || { sed -n '2,5s/^# \?//p' "$0" >&2; exit 2; }
tag=v$1
git diff --quiet HEAD || { echo "tag.sh: changes are not committed" >&2; exit 1; }
named=$(git rev-parse -q --verify "$tag^{commit}") || { git tag -a "$tag" -m "attnd $1"; exit; }
[ "$named" = "$(git rev-parse HEAD)" ] || { echo "tag.sh: $tag is another commit, $named" >&2; exit 1; }
