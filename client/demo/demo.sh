#!/usr/bin/env bash
# What `./dev demo` shows, after the build: a daemon on free ports, a training on it, its check, a short
# benchmark, its metrics, and its drain. Exit status 0 only when each of these went well.
#
#     client/demo/demo.sh [--steps N]
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."

folder=$(mktemp -d)
daemon=
# Ends the daemon whatever happens, and shows its log if the demo failed.
finish() {
  local status=$?
  [ -z "$daemon" ] || kill -KILL "$daemon" 2>/dev/null || true
  [ $status = 0 ] || { echo "--- the daemon's log:"; cat "$folder/log"; } >&2
  rm -rf "$folder"
  exit $status
}
trap finish EXIT

heading() { printf '\n=== %s\n' "$*"; }

# wait_for FILE: until the daemon has written it, ten minutes at most.
wait_for() {
  local tenths=0
  until [ -s "$1" ]; do
    kill -0 "$daemon" 2>/dev/null && [ $tenths -lt 6000 ] || { echo "demo.sh: attnd did not start" >&2; return 1; }
    sleep 0.1
    tenths=$((tenths + 1))
    [ $((tenths % 300)) != 0 ] || echo "starting for $((tenths / 10)) s: kernels that the build lacks are compiled once"
  done
}

# fetch HOST PORT PATH: the body of an HTTP reply, without a tool that may not be there.
fetch() {
  exec 3<>"/dev/tcp/$1/$2"
  printf 'GET %s HTTP/1.0\r\nHost: %s\r\n\r\n' "$3" "$1" >&3
  sed '1,/^\r*$/d' <&3
  exec 3>&-
}

heading "Starting attnd on free ports of 127.0.0.1"
started=$(date +%s%N)
bazel-bin/server/attnd --listen 127.0.0.1:0 --port_file "$folder/port" --metrics_listen 127.0.0.1:0 \
  --metrics_port_file "$folder/metrics_port" --backend auto --drain_delay 0 >"$folder/log" 2>&1 </dev/null &
daemon=$!
wait_for "$folder/port"
wait_for "$folder/metrics_port"
echo "ready after $((($(date +%s%N) - started) / 1000000)) ms"
address=127.0.0.1:$(cat "$folder/port")
metrics_port=$(cat "$folder/metrics_port")
attnctl=(bazel-bin/client/attnctl --address "$address")
"${attnctl[@]}" info

heading "Training: every attention call goes to $address, forward and backward"
bazel-bin/client/demo/train --address "$address" "$@"

heading "attnctl check: random problems against float64 arithmetic on this machine"
"${attnctl[@]}" check

heading "attnctl bench: a few seconds of load"
"${attnctl[@]}" bench --shape 1,8,1024,64 --causal --direction both --concurrency-range 2 --warmup 1 --duration 4

heading "Metrics: http://127.0.0.1:$metrics_port/metrics (docs/METRICS.md), for example"
fetch 127.0.0.1 "$metrics_port" /metrics >"$folder/metrics"
grep -E '^attnd_(requests_total.*code="OK"|received_bytes_total|sent_bytes_total|kernel_flops_total)' "$folder/metrics" |
  grep -v ' 0$'

heading "Draining by SIGTERM"
kill -TERM "$daemon"
status=0
wait "$daemon" || status=$?
daemon=
echo "attnd exited with status $status"
exit $status
