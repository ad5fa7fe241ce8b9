#!/bin/sh
# Fuzzes the mask compiler against its oracle with clang's libFuzzer and sanitizers.
#   tests/fuzz/fuzz_masks.sh [libFuzzer's options, e.g. -max_total_time=60]
set -eu
cd "$(dirname "$0")/../.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
sources=$(find attention/masks -name '*.cc' ! -name '*_test.cc')
clang++ -std=c++20 -O1 -g -UNDEBUG -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    -I. -o "$build/mask_fuzzer" tests/fuzz/mask_fuzzer.cc $sources \
    -labsl_status -labsl_statusor -labsl_cord -labsl_cordz_info -labsl_strings -labsl_str_format_internal \
    -labsl_int128 -labsl_throw_delegate -labsl_raw_hash_set -labsl_hash -labsl_city -labsl_low_level_hash \
    -labsl_raw_logging_internal -lcrypto
"$build/mask_fuzzer" -max_len=4096 "$@"
