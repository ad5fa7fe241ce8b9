// overload: what a daemon does with twice the calls that it can compute. First the peak, in a
// closed loop; then an open loop of twice that rate, each call with a deadline, whatever the daemon
// answers; then the peak again.
//
//   overload --address unix:/tmp/s --metrics http://127.0.0.1:9464/metrics --seconds 600 --stream
//   overload --address unix:/tmp/s --deadline_ms 100 200 500 1000 2000 5000 10000
//
// Prints every ten seconds what was answered, and the daemon's memory and queue; at the end goodput
// over peak, what was answered of each deadline, latency of what was accepted from when it was due,
// latency of refusals as the client and as the daemon saw it, and calls that were neither. Choose a
// shape whose bytes are few beside its work, or the wire is measured.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "net/process_tuning.h"
#include "tools/benchmarks/load_flags.h"
#include "tools/benchmarks/load_sender.h"

namespace attnd {
namespace {

struct Options {
  LoadFlags load{.length = 8192, .heads = 1};
  double seconds = 60, factor = 2, peak_seconds = 8, interval = 10;
  std::vector<double> deadline_ms = {1000};
  int connections = 8, in_flight = 64;
  bool stream = false;
};

constexpr LoadSeconds kLongDeadline(60);  // of the closed loop

std::optional<MetricsText> MetricsOf(const Options& options) {
  if (options.load.metrics.empty()) return std::nullopt;
  return Scrape(options.load.metrics);
}

double Percentile(const std::vector<double>& sorted, double percent) {
  if (sorted.empty()) return 0;
  return sorted[std::min(sorted.size() - 1,
                         static_cast<size_t>(percent / 100 * double(sorted.size())))];
}

void PrintLatencies(const char* what, std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  std::printf("%s: %zu calls, p50 %.2f ms, p99 %.2f ms, worst %.2f ms\n", what, seconds.size(),
              1e3 * Percentile(seconds, 50), 1e3 * Percentile(seconds, 99),
              1e3 * Percentile(seconds, 100));
}

double MeasurePeak(LoadSender& sender, int in_flight, double seconds) {
  const LoadClock::time_point begin = LoadClock::now();
  while (LoadSeconds(LoadClock::now() - begin).count() < seconds) {
    if (sender.in_flight() < in_flight) {
      sender.Send(LoadClock::now(), kLongDeadline);
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  const double took = LoadSeconds(LoadClock::now() - begin).count();
  const LoadOutcome outcome = sender.Take();
  sender.WaitUntilIdle();
  sender.Take();
  return static_cast<double>(outcome.accepted.size()) / took;
}

void SendAtRate(LoadSender& sender, double rate, double seconds,
                const std::vector<double>& deadline_ms) {
  std::mt19937 random;
  const LoadClock::time_point begin = LoadClock::now();
  const auto calls = static_cast<int64_t>(rate * seconds);
  for (int64_t n = 0; n < calls; ++n) {
    const auto due = begin + std::chrono::duration_cast<LoadClock::duration>(
                                 LoadSeconds(static_cast<double>(n) / rate));
    std::this_thread::sleep_until(due);
    sender.Send(due, LoadSeconds(deadline_ms[random() % deadline_ms.size()] / 1e3));
  }
}

void Add(const LoadOutcome& part, LoadOutcome& all) {
  all.accepted.insert(all.accepted.end(), part.accepted.begin(), part.accepted.end());
  all.refused.insert(all.refused.end(), part.refused.begin(), part.refused.end());
  for (const auto& [reason, count] : part.lost) all.lost[reason] += count;
  all.late = std::max(all.late, part.late);
  for (const auto& [deadline, share] : part.by_deadline) {
    all.by_deadline[deadline].sent += share.sent;
    all.by_deadline[deadline].accepted += share.accepted;
  }
}

int64_t Lost(const LoadOutcome& outcome) {
  int64_t lost = 0;
  for (const auto& [reason, count] : outcome.lost) lost += count;
  return lost;
}

void PrintInterval(double at, double took, const LoadOutcome& part, const Options& options) {
  std::printf("  %4.0f s: %7.1f answered/s %7.1f refused/s %6.1f lost/s", at,
              static_cast<double>(part.accepted.size()) / took,
              static_cast<double>(part.refused.size()) / took,
              static_cast<double>(Lost(part)) / took);
  if (const std::optional<MetricsText> now = MetricsOf(options); now.has_value()) {
    auto mib = [&](const char* name) { return now->Sum(name) / (1 << 20); };
    std::printf(
        "  RSS %8.1f MiB, GPU by driver %9.1f, in use %7.1f, staging %7.1f MiB, queue %.3f s",
        mib("process_resident_memory_bytes"), mib("attnd_hbm_device_used_bytes"),
        mib("attnd_hbm_pool_used_bytes"), mib("attnd_staging_pool_used_bytes"),
        now->Sum("attnd_queue_estimated_seconds"));
  }
  std::printf("\n");
  std::fflush(stdout);
}

struct OpenLoopResult {
  LoadOutcome all;
  double goodput = 0;  // answers a second while calls were sent
};

OpenLoopResult OpenLoop(LoadSender& sender, double rate, const Options& options) {
  OpenLoopResult result;
  LoadOutcome& all = result.all;
  std::atomic<bool> sending{true};
  std::thread reporter([&] {
    const LoadClock::time_point begin = LoadClock::now();
    LoadClock::time_point last = begin;
    for (int n = 1; sending; ++n) {
      const auto wake = begin + std::chrono::duration_cast<LoadClock::duration>(
                                    LoadSeconds(n * options.interval));
      while (sending && LoadClock::now() < wake) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      const LoadOutcome part = sender.Take();
      const LoadClock::time_point now = LoadClock::now();
      PrintInterval(LoadSeconds(now - begin).count(), LoadSeconds(now - last).count(), part,
                    options);
      last = now;
      Add(part, all);
    }
  });
  SendAtRate(sender, rate, options.seconds, options.deadline_ms);
  sending = false;
  reporter.join();
  result.goodput = static_cast<double>(all.accepted.size()) / options.seconds;
  sender.WaitUntilIdle();
  Add(sender.Take(), all);
  return result;
}

void PrintDaemonsView(const MetricsText& before, const MetricsText& now) {
  const char* name = "attnd_refusal_duration_seconds";
  const auto from = before.Buckets(name, {}), to = now.Buckets(name, {});
  std::printf("refused, as the daemon saw it: p50 %.3f ms, p99 %.3f ms, p99.9 %.3f ms\n",
              1e3 * QuantileBetween(from, to, 0.5), 1e3 * QuantileBetween(from, to, 0.99),
              1e3 * QuantileBetween(from, to, 0.999));
  auto print = [&](const char* series, const char* label) {
    for (const std::string& value : now.ValuesOf(series, label)) {
      const Labels labels = {{label, value}};
      const double count = now.Sum(series, labels) - before.Sum(series, labels);
      if (count > 0) std::printf("  %s{%s=\"%s\"} %.0f\n", series, label, value.c_str(), count);
    }
  };
  print("attnd_rejected_requests_total", "reason");
  print("attnd_expired_requests_total", "stage");
  print("attnd_cancelled_requests_total", "stage");
  print("attnd_hbm_pool_allocation_failures_total", "device");
}

void PrintResult(const OpenLoopResult& result, double before, double after,
                 const Options& options) {
  const auto& [all, goodput] = result;
  std::printf("peak after: %.1f calls/s\n", after);
  std::printf(
      "goodput at %.1f times the peak for %.0f s: %.1f calls/s, %.1f %% of the peak before, "
      "%.1f %% of that after\n",
      options.factor, options.seconds, goodput, 100 * goodput / before, 100 * goodput / after);
  for (const auto& [deadline, share] : all.by_deadline) {
    std::printf("deadline %.0f ms: %.1f %% of %lld calls answered\n", 1e3 * deadline,
                100 * double(share.accepted) / double(share.sent),
                static_cast<long long>(share.sent));
  }
  std::printf("calls were sent at most %.1f ms late\n", 1e3 * all.late);
  PrintLatencies("answered, from when it was due", all.accepted);
  PrintLatencies("refused, from when it was sent", all.refused);
  std::printf("neither:%s\n", all.lost.empty() ? " none" : "");
  for (const auto& [reason, count] : all.lost) {
    std::printf("  %s %lld\n", reason.c_str(), static_cast<long long>(count));
  }
}

int Run(const Options& options) {
  const LoadFlags& load = options.load;
  LoadSender sender(load.address, options.connections, load.Request(load.length), options.stream);
  MeasurePeak(sender, options.in_flight, 2);  // connections, and the daemon's estimates
  const double peak = MeasurePeak(sender, options.in_flight, options.peak_seconds);
  std::printf("peak, %d calls in flight, %s: %.1f calls/s (N %d, %d heads, D %d, float16)\n",
              options.in_flight, options.stream ? "streamed" : "unary", peak,
              static_cast<int>(load.length), static_cast<int>(load.heads),
              static_cast<int>(load.head_dim));
  std::fflush(stdout);
  const std::optional<MetricsText> before = MetricsOf(options);
  const OpenLoopResult result = OpenLoop(sender, options.factor * peak, options);
  const std::optional<MetricsText> now = MetricsOf(options);
  PrintResult(result, peak, MeasurePeak(sender, options.in_flight, options.peak_seconds), options);
  if (now.has_value()) PrintDaemonsView(*before, *now);
  return 0;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("A daemon at more than its capacity", "overload");
  options.load.Add(app);
  app.add_option("--seconds", options.seconds, "of the open loop");
  app.add_option("--factor", options.factor, "its rate over the peak");
  app.add_option("--deadline_ms", options.deadline_ms, "of its calls; of several one at random");
  app.add_option("--peak_seconds", options.peak_seconds, "of either closed loop");
  app.add_option("--interval", options.interval, "seconds between lines");
  app.add_option("--connections", options.connections, "to the daemon");
  app.add_option("--in_flight", options.in_flight, "calls of the closed loop");
  app.add_flag("--stream", options.stream, "ForwardStream instead of Forward");
  CLI11_PARSE(app, argc, argv);
  return Run(options);
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  return attnd::Main(argc, argv);
}
