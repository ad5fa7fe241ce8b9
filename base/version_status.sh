#!/bin/sh
# Bazel runs this before each build: keys that a stamped rule may read. The commit is 12 digits, with
# "-dirty" when tracked files differ from it, or "unknown" outside a git checkout.
commit=$(git rev-parse --short=12 HEAD 2>/dev/null) || commit=unknown
[ "$commit" = unknown ] || git diff --quiet HEAD -- 2>/dev/null || commit="$commit-dirty"
echo "STABLE_ATTND_COMMIT $commit"
