#include "tools/wire_bench/wire_bench.h"

#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "attention/cost.h"
#include "base/status_macros.h"
#include "client/cli/load_generator.h"
#include "client/cli/metrics_text.h"

namespace attnd {
namespace {

constexpr int64_t kHeadDim = 256;
constexpr int64_t kSmallRows = 4;                      // 4 KiB of q and of o
constexpr int64_t kMaxSmallBytes = int64_t{64} << 10;  // never streamed beside streams

Problem OneHead(int64_t q_len, int64_t kv_len) {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.qk_head_dim = p.v_head_dim = kHeadDim;
  return p;
}

Problem ProblemOf(const WireLoad& load) {
  int64_t rows =
      std::max<int64_t>(1, load.tensor_bytes / (kHeadDim * static_cast<int64_t>(sizeof(float))));
  return OneHead(rows, load.pattern == WirePattern::kEcho ? 1 : rows);
}

double OwnCpuSeconds() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

// The daemon's counters at one moment.
struct DaemonCounters {
  double cpu_seconds = 0, received = 0, sent = 0, copied = 0;

  static absl::StatusOr<DaemonCounters> Read(const std::string& url) {
    ASSIGN_OR_RETURN(std::string text, FetchMetrics(url, absl::Seconds(5)));
    ASSIGN_OR_RETURN(MetricsText metrics, MetricsText::Parse(text));
    return DaemonCounters{.cpu_seconds = metrics.Sum("process_cpu_seconds_total"),
                          .received = metrics.Sum("attnd_received_bytes_total"),
                          .sent = metrics.Sum("attnd_sent_bytes_total"),
                          .copied = metrics.Sum("attnd_host_copy_bytes_total")};
  }
};

WireLatency LatencyOf(const Measured& measured) {
  return {measured.Percentile(50), measured.Percentile(99)};
}

ClientOptions OptionsFor(ClientOptions options, const WireLoad& load) {
  options.channels_per_address = load.channels;
  options.stream_above_bytes = load.mode == WireMode::kStream
                                   ? std::min(kMaxSmallBytes, load.tensor_bytes - 1)
                                   : std::numeric_limits<int64_t>::max();
  if (load.mode != WireMode::kMemfd) options.shared_memory_bytes = 0;
  return options;
}

// Runs the bulk load, and the small calls beside it.
absl::StatusOr<Measured> RunLoads(ClientOptions options, const WireLoad& load, WireRow& row) {
  ASSIGN_OR_RETURN(auto client, AttentionClient::Connect(OptionsFor(std::move(options), load)));
  Problem problem = ProblemOf(load);
  LoadGenerator generator(*client, problem);
  bool backward = load.pattern == WirePattern::kBackward;
  Load bulk{.callers = load.channels * load.depth,
            .forward = !backward,
            .backward = backward,
            .warmup = load.warmup,
            .duration = load.duration};
  if (!load.small_calls) {
    ASSIGN_OR_RETURN(LoadResult result, generator.Run(bulk));
    return backward ? result.backward : result.forward;
  }
  Problem small_problem = OneHead(kSmallRows, 1);
  LoadGenerator small(*client, small_problem);
  absl::StatusOr<LoadResult> small_result = absl::UnknownError("has not run");
  std::thread thread([&] {
    small_result = small.Run({.callers = 1, .warmup = load.warmup, .duration = load.duration});
  });
  absl::StatusOr<LoadResult> result = generator.Run(bulk);
  thread.join();
  RETURN_IF_ERROR(result.status());
  RETURN_IF_ERROR(small_result.status());
  row.small = LatencyOf(small_result->forward);
  return backward ? result->backward : result->forward;
}

// lse comes back only where a backward needs it, so a forward's reply is o alone.
PayloadBytes BytesOfCall(const WireLoad& load) {
  Problem problem = ProblemOf(load);
  if (load.pattern == WirePattern::kBackward) return BytesOf(problem, Direction::kBackward);
  PayloadBytes bytes = BytesOf(problem, Direction::kForward);
  bytes.output -= problem.LseElements() * static_cast<int64_t>(sizeof(float));
  return bytes;
}

}  // namespace

absl::StatusOr<WireRow> RunWireBench(ClientOptions options, const WireLoad& load,
                                     const std::string& metrics_url) {
  WireRow row{.load = load};
  DaemonCounters before, after;
  if (!metrics_url.empty()) {
    ASSIGN_OR_RETURN(before, DaemonCounters::Read(metrics_url));
  }
  double cpu = OwnCpuSeconds();
  ASSIGN_OR_RETURN(Measured measured, RunLoads(std::move(options), load, row));
  cpu = OwnCpuSeconds() - cpu;
  PayloadBytes bytes = BytesOfCall(load);
  double calls = measured.RequestsPerSecond();
  row.up_bytes_per_second = calls * static_cast<double>(bytes.input);
  row.down_bytes_per_second = calls * static_cast<double>(bytes.output);
  row.bulk = LatencyOf(measured);
  row.errors = measured.errors;
  // Processor time counts the warm-up too, so the bytes must; without the daemon's counters they
  // are taken to have come at the measured rate.
  double moved = (row.up_bytes_per_second + row.down_bytes_per_second) *
                 absl::ToDoubleSeconds(load.warmup + load.duration);
  if (!metrics_url.empty()) {
    ASSIGN_OR_RETURN(after, DaemonCounters::Read(metrics_url));
    double received = after.received - before.received;
    moved = received + after.sent - before.sent;
    row.daemon_cpu_per_gb = (after.cpu_seconds - before.cpu_seconds) / moved * 1e9;
    row.copies_per_received_byte = (after.copied - before.copied) / received;
  }
  row.client_cpu_per_gb = cpu / moved * 1e9;
  return row;
}

const char* NameOf(WirePattern pattern) {
  constexpr const char* kNames[] = {"echo", "forward", "backward"};
  return kNames[static_cast<int>(pattern)];
}

const char* NameOf(WireMode mode) {
  constexpr const char* kNames[] = {"unary", "stream", "memfd"};
  return kNames[static_cast<int>(mode)];
}

}  // namespace attnd
