#!/bin/sh
# Fuzzes layouts, rows and steps of modules on the CPU engine with clang's libFuzzer and sanitizers.
#   bazel build //tests/fuzz:module_fuzzer && tests/fuzz/fuzz_modules.sh [libFuzzer's options, e.g. -max_total_time=60]
# FUZZ_BUILD: a folder that keeps the objects for the next time.
set -eu
cd "$(dirname "$0")/../.."
build=${FUZZ_BUILD:-$(mktemp -d)}
[ -n "${FUZZ_BUILD:-}" ] || trap 'rm -rf "$build"' EXIT
mask=bazel-bin/proto/attnd/v1/_virtual_imports/mask_proto
sources=$(bazel query --noshow_progress 'kind("source file", deps(//tests/fuzz:module_fuzzer)) intersect //...:*' |
    sed -n 's|^//\(.*\):\(.*\.cc\)$|\1/\2|p' | grep -v _test.cc)
mkdir -p "$build/objects"
for source in $sources bazel-bin/proto/attnd/v1/module.pb.cc bazel-bin/proto/attnd/v1/attention.pb.cc \
    "$mask/attnd/v1/mask.pb.cc"; do
  object=$build/objects/$(echo "$source" | tr / _).o
  [ "$object" -nt "$source" ] || printf '%s %s\n' "$source" "$object"
done | xargs -r -P "$(nproc)" -L 1 sh -c 'clang++ -std=c++20 -O1 -g -UNDEBUG -fsanitize=fuzzer-no-link,address,undefined \
    -fno-sanitize-recover=undefined -ffp-contract=off -I. -Ibazel-bin -I"$0" -c "$1" -o "$2"' "$mask"
clang++ -fsanitize=fuzzer,address,undefined -o "$build/module_fuzzer" "$build"/objects/*.o -lprotobuf -lhwy \
    -labsl_status -labsl_statusor -labsl_cord -labsl_cordz_info -labsl_strings -labsl_str_format_internal \
    -labsl_int128 -labsl_throw_delegate -labsl_raw_hash_set -labsl_hash -labsl_city -labsl_low_level_hash \
    -labsl_time -labsl_synchronization -labsl_raw_logging_internal -lcrypto
"$build/module_fuzzer" -max_len=4096 "$@"
