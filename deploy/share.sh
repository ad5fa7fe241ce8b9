#!/usr/bin/env bash
# Makes the folder share/ of a bundle: manual pages of attnd, attnctl and each of its commands (by help2man), and completion
# for bash, all from what the programs say themselves. Called by bundle.sh.
#
#     deploy/share.sh FOLDER
set -euo pipefail
[ $# = 1 ] || { sed -n '2,5s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
output=$(readlink -f "$1")
cd "$(dirname "$(readlink -f "$0")")/.."
version=$(sed -n 's/.*kVersion = "\(.*\)";/\1/p' base/version.h)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 0)
export SOURCE_DATE_EPOCH
attnctl=bazel-bin/client/attnctl

# page SECTION NAME COMMAND
page() {
  local says
  says=$($3 --help | sed -En '1{s/^attn(d|ctl):? //; p}')
  mkdir -p "$output/man/man$1"
  # Where a program lies is no part of its name.
  help2man --no-info --section "$1" --version-string "$version" --name "${says%.}" "$3" |
    sed 's/bazel\\-bin[^ ]*\///g' > "$output/man/man$1/$2.$1"
}

page 8 attnd bazel-bin/server/attnd
page 1 attnctl $attnctl
for command in $($attnctl --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p'); do
  page 1 "attnctl-$command" "$attnctl $command"
done

mkdir -p "$output/bash-completion/completions"
$attnctl completion bash > "$output/bash-completion/completions/attnctl"
