#include "server/metrics/metrics.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/call/status_details.h"

namespace attnd {
namespace {

using prometheus::Labels;

// The series with these labels; it must be there.
prometheus::ClientMetric Read(const Metrics& metrics, const std::string& name,
                              const Labels& labels) {
  for (const auto& collectable : metrics.collectables()) {
    for (const prometheus::MetricFamily& family : collectable->Collect()) {
      if (family.name != name) continue;
      for (const prometheus::ClientMetric& metric : family.metric) {
        Labels found;
        for (const auto& label : metric.label) found[label.name] = label.value;
        if (found == labels) return metric;
      }
    }
  }
  ADD_FAILURE() << name;
  return {};
}

TEST(Metrics, CountsACutCallUnderItsMethodStageAndReason) {
  struct Case {
    Method method;
    WorkStage stage;
    absl::string_view reason;
    Labels labels;
  };
  const Case cases[] = {
      {Method::kForward,
       WorkStage::kReceive,
       reason::kStreamIdle,
       {{"method", "Forward"}, {"stage", "receive"}, {"reason", "idle"}}},
      {Method::kForward,
       WorkStage::kSend,
       reason::kStreamTooSlow,
       {{"method", "Forward"}, {"stage", "send"}, {"reason", "too_slow"}}},
      {Method::kBackward,
       WorkStage::kReceive,
       reason::kStreamTooSlow,
       {{"method", "Backward"}, {"stage", "receive"}, {"reason", "too_slow"}}},
      {Method::kBackward,
       WorkStage::kSend,
       reason::kDeadlineExceededTransfer,
       {{"method", "Backward"}, {"stage", "send"}, {"reason", "too_long"}}},
  };
  Metrics metrics;
  for (const Case& one : cases) {
    EXPECT_EQ(Read(metrics, "attnd_calls_cut_total", one.labels).counter.value, 0);
    metrics.CallCut(one.method, one.stage, one.reason);
  }
  for (const Case& one : cases) {
    EXPECT_EQ(Read(metrics, "attnd_calls_cut_total", one.labels).counter.value, 1);
  }
}

TEST(Metrics, HasOneSeriesForReasonsThatShareALabel) {
  Metrics metrics;
  for (absl::string_view reason : {reason::kTokenMissing, reason::kTokenInvalid}) {
    metrics.CallStarted(Method::kForward);
    metrics.CallFinished(Method::kForward, absl::StatusCode::kUnauthenticated, reason,
                         absl::ZeroDuration());
  }
  const Labels refused = {{"reason", "unauthenticated"}};
  EXPECT_EQ(Read(metrics, "attnd_rejected_requests_total", refused).counter.value, 2);
}

TEST(Metrics, CountsWhatEachOfSixtyFourCallersUsesAndTheOthersTogether) {
  Metrics metrics;
  for (int round = 0; round < 2; ++round) {
    for (int n = 0; n < 1000; ++n) {
      metrics.callers().CallEnded(
          "caller" + std::to_string(n),
          {.ok = round == 0, .received_bytes = 10, .sent_bytes = 3, .compute = absl::Seconds(0.5)});
    }
  }
  for (const auto& [caller, calls] :
       {std::pair("caller0", 1), std::pair("caller63", 1), std::pair("other", 1000 - 64)}) {
    for (const char* result : {"ok", "error"}) {
      const Labels labels = {{"caller", caller}, {"result", result}};
      EXPECT_EQ(Read(metrics, "attnd_caller_requests_total", labels).counter.value, calls);
    }
    EXPECT_EQ(
        Read(metrics, "attnd_caller_compute_seconds_total", {{"caller", caller}}).counter.value,
        calls);
    const Labels received = {{"caller", caller}, {"direction", "received"}};
    const Labels sent = {{"caller", caller}, {"direction", "sent"}};
    EXPECT_EQ(Read(metrics, "attnd_caller_bytes_total", received).counter.value, 20 * calls);
    EXPECT_EQ(Read(metrics, "attnd_caller_bytes_total", sent).counter.value, 6 * calls);
  }
  size_t callers = 0;
  for (const auto& collectable : metrics.collectables()) {
    for (const prometheus::MetricFamily& family : collectable->Collect()) {
      if (family.name == "attnd_caller_compute_seconds_total") callers = family.metric.size();
    }
  }
  EXPECT_EQ(callers, 65u);
}

// A certificate may have any bytes and any length.
TEST(Metrics, MakesACallersNameShortAndPrintable) {
  Metrics metrics;
  metrics.callers().CallEnded("a\xff\n" + std::string(100, 'b'), {.ok = true});
  const Labels labels = {{"caller", "a__" + std::string(61, 'b')}, {"result", "ok"}};
  EXPECT_EQ(Read(metrics, "attnd_caller_requests_total", labels).counter.value, 1);
}

TEST(Metrics, AddsUpWhatThreadsDoAtOnce) {
  constexpr int kThreads = 8, kCalls = 1000;
  Metrics metrics;
  metrics.AddDevice("cpu", BackendInfo());
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int n = 0; n < kCalls; ++n) {
        metrics.CallStarted(Method::kForward);
        metrics.KernelRan({0, Direction::kForward, ElementType::kFloat16, "kernel", 64}, 1e-3, 1);
        metrics.CallFinished(Method::kForward, absl::StatusCode::kOk, "", absl::Milliseconds(3));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Labels method = {{"method", "Forward"}};
  EXPECT_EQ(Read(metrics, "attnd_requests_in_flight", method).gauge.value, 0);
  EXPECT_EQ(Read(metrics, "attnd_request_duration_seconds", method).histogram.sample_count,
            kThreads * kCalls);
  const Labels kernel = {
      {"device", "cpu"}, {"direction", "forward"}, {"dtype", "float16"}, {"kernel", "kernel"}};
  EXPECT_EQ(Read(metrics, "attnd_kernel_duration_seconds", kernel).histogram.sample_count,
            kThreads * kCalls);
}

}  // namespace
}  // namespace attnd
