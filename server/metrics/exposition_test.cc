#include "server/metrics/exposition.h"

#include <gtest/gtest.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/summary.h>
#include <prometheus/text_serializer.h>

#include <limits>
#include <sstream>

namespace attnd {
namespace {

std::string Serialized(const std::vector<prometheus::MetricFamily>& families) {
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, families);
  return text.str();
}

TEST(Exposition, HasTheBytesOfTheLibrarysSerializer) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  prometheus::Registry registry;
  auto& gauges = prometheus::BuildGauge().Name("gauge").Help("a \\ b").Register(registry);
  int n = 0;
  for (double value :
       {0.0, -0.0, 1.0, -3.0, 0.1, 1e-9, 123456789.0, 1e14, 1e15, 1e16, 1.5e300, -2.5, 1 / 3.0,
        kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    gauges.Add({{"n", std::to_string(n++)}, {"odd", "a\"b\\c\nd"}}).Set(value);
  }
  prometheus::BuildGauge().Name("bare").Register(registry).Add({}).Set(7);
  prometheus::BuildCounter().Name("c_total").Help("c").Register(registry).Add({}).Increment(2.25);
  auto& times = prometheus::BuildHistogram().Name("h").Help("h").Register(registry);
  for (const char* device : {"a", "b"}) {
    auto& histogram =
        times.Add({{"device", device}}, prometheus::Histogram::BucketBoundaries{1e-6, 0.25, 1, 30});
    for (double value : {1e-7, 0.3, 0.7, 99.0}) histogram.Observe(value);
  }
  prometheus::BuildSummary()
      .Name("s")
      .Register(registry)
      .Add({}, prometheus::Summary::Quantiles{{0.5, 0.05}, {0.99, 0.001}})
      .Observe(3);
  std::vector<prometheus::MetricFamily> families = registry.Collect();
  families.front().metric.front().timestamp_ms = 1234;
  EXPECT_EQ(Exposition(families), Serialized(families));
  EXPECT_EQ(Exposition({}), "");
}

}  // namespace
}  // namespace attnd
