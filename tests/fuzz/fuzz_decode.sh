#!/bin/sh
# Fuzzes Decode with clang's libFuzzer and AddressSanitizer, from the checked-in seeds.
#   bazel build //server/wire:decode && tests/fuzz/fuzz_decode.sh [libFuzzer's options, e.g. -max_total_time=60]
set -eu
cd "$(dirname "$0")/../.."
build=$(mktemp -d)
mask=bazel-bin/proto/attnd/v1/_virtual_imports/mask_proto
capture=bazel-bin/proto/attnd/v1/_virtual_imports/capture_proto
trap 'rm -rf "$build"' EXIT
clang++ -std=c++20 -O1 -g -UNDEBUG -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    -I. -Ibazel-bin -I"$mask" -I"$capture" -o "$build/decode_fuzzer" tests/fuzz/decode_fuzzer.cc \
    server/wire/decode.cc server/wire/decode_problem.cc server/wire/wire_check.cc server/call/message_bytes.cc \
    server/wire/decode_tensors.cc \
    server/call/status_details.cc attention/problem.cc attention/cost.cc \
    bazel-bin/proto/attnd/v1/attention.pb.cc "$mask/attnd/v1/mask.pb.cc" \
    "$capture/attnd/v1/capture.pb.cc" kernels/backend.cc \
    bazel-bin/proto/google/rpc/error_details.pb.cc \
    bazel-bin/proto/google/rpc/status.pb.cc \
    -lgrpc++ -lgrpc -lgpr -lprotobuf -labsl_status -labsl_statusor -labsl_cord -labsl_cordz_info -labsl_strings \
    -labsl_str_format_internal -labsl_int128 -labsl_throw_delegate -labsl_time -labsl_synchronization \
    -labsl_raw_logging_internal
mkdir "$build/corpus"
"$build/decode_fuzzer" -max_len=8192 "$@" "$build/corpus" tests/fuzz/decode_corpus
