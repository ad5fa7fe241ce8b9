#include "server/thread_metrics.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "attention/random_problem.h"

namespace attnd {
namespace {

using Metric = prometheus::ClientMetric;

// The series with these labels; it must be there.
Metric Read(const ThreadMetrics& metrics, const std::string& name,
            const ThreadMetrics::Labels& labels) {
  for (const prometheus::MetricFamily& family : metrics.Collect()) {
    if (family.name != name) continue;
    for (const Metric& metric : family.metric) {
      ThreadMetrics::Labels found;
      for (const auto& label : metric.label) found[label.name] = label.value;
      if (found == labels) return metric;
    }
  }
  ADD_FAILURE() << name;
  return {};
}

TEST(ThreadMetrics, AddsUpWhatThreadsAtOnceHaveAdded) {
  constexpr int kThreads = 8, kTimes = 20000;
  ThreadMetrics metrics;
  auto counter = metrics.AddCounter("calls_total", "Calls.", {{"code", "OK"}});
  auto gauge = metrics.AddGauge("calls", "Calls.", {});
  std::atomic<bool> stop{false};
  std::thread scraper([&] {
    double last = 0;
    while (!stop) {
      const double now = Read(metrics, "calls_total", {{"code", "OK"}}).counter.value;
      EXPECT_GE(now, last);
      last = now;
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int n = 0; n < kTimes; ++n) {
        counter.Add();
        gauge.Add(t % 2 == 0 ? 1 : -1);  // what one thread adds another may take
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  scraper.join();
  EXPECT_EQ(Read(metrics, "calls_total", {{"code", "OK"}}).counter.value, kThreads * kTimes);
  EXPECT_EQ(Read(metrics, "calls", {}).gauge.value, 0);
}

TEST(ThreadMetrics, KeepsWhatThreadsThatEndedHaveAdded) {
  ThreadMetrics metrics, others;
  auto counter = metrics.AddCounter("calls_total", "Calls.", {});
  auto other = others.AddCounter("calls_total", "Calls.", {});
  for (int n = 0; n < 100; ++n) {
    std::thread([&] {
      counter.Add(3);
      other.Add(5);
      counter.Add(4);
    }).join();
  }
  EXPECT_EQ(Read(metrics, "calls_total", {}).counter.value, 700);
  EXPECT_EQ(Read(others, "calls_total", {}).counter.value, 500);
}

// prometheus-cpp's own histogram, which takes a mutex, is the oracle.
TEST(ThreadMetrics, CountsInBucketsAsPrometheusDoes) {
  const ThreadMetrics::Buckets bounds = {0, 0.5, 1, 2, 5};
  ThreadMetrics metrics;
  auto histogram = metrics.AddHistogram("took_seconds", "Time.", {{"stage", "send"}}, bounds);
  prometheus::Histogram expected(bounds);
  Random random(1);
  std::vector<double> values(bounds);  // a bound itself counts below it
  for (int n = 0; n < 1000; ++n) values.push_back(random.Uniform() * 8 - 1);
  for (double value : values) {
    histogram.Observe(value);
    expected.Observe(value);
  }
  const auto got = Read(metrics, "took_seconds", {{"stage", "send"}}).histogram;
  const auto want = expected.Collect().histogram;
  EXPECT_EQ(got.sample_count, want.sample_count);
  EXPECT_NEAR(got.sample_sum, want.sample_sum, 1e-9);
  ASSERT_EQ(got.bucket.size(), want.bucket.size());
  for (size_t n = 0; n < got.bucket.size(); ++n) {
    EXPECT_EQ(got.bucket[n].upper_bound, want.bucket[n].upper_bound);
    EXPECT_EQ(got.bucket[n].cumulative_count, want.bucket[n].cumulative_count) << n;
  }
}

TEST(ThreadMetrics, GivesASeriesThatIsThereAlready) {
  ThreadMetrics metrics;
  metrics.AddCounter("calls_total", "Calls.", {{"gpu", "gpu0"}}).Add();
  metrics.AddCounter("calls_total", "Calls.", {{"gpu", "gpu1"}}).Add(10);
  metrics.AddCounter("calls_total", "Calls.", {{"gpu", "gpu0"}}).Add();
  EXPECT_EQ(Read(metrics, "calls_total", {{"gpu", "gpu0"}}).counter.value, 2);
  EXPECT_EQ(metrics.Collect().front().metric.size(), 2u);
}

// More than the first piece of a thread's cells holds.
TEST(ThreadMetrics, HasRoomForManySeries) {
  ThreadMetrics metrics;
  std::vector<ThreadMetrics::Number> numbers;
  for (int n = 0; n < 5000; ++n) {
    numbers.push_back(metrics.AddGauge("g", "G.", {{"n", std::to_string(n)}}));
    numbers.back().Add(n);
  }
  for (int n : {0, 1023, 1024, 4999}) {
    EXPECT_EQ(Read(metrics, "g", {{"n", std::to_string(n)}}).gauge.value, n);
  }
}

}  // namespace
}  // namespace attnd
