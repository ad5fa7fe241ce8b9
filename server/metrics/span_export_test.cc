#include "server/metrics/span_export.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "tests/fixtures/span_collector.h"

namespace attnd {
namespace {

CallSpan MakeSpan() {
  return {.trace = {.trace_id = std::string(32, 'a'), .parent_id = std::string(16, 'b')},
          .name = "attnd.v1.Attention/Forward",
          .begin = absl::FromUnixNanos(1000),
          .end = absl::FromUnixNanos(5000),
          .stages = {{"kernel", absl::FromUnixNanos(2000), absl::FromUnixNanos(3000)}},
          .attributes = {{"attnd.caller", "me"}},
          .ok = false,
          .error = "wrong \xff"};
}

TEST(SpanExport, WritesACallWithItsStagesAsItsChildren) {
  const auto document = nlohmann::json::parse(OtlpJson({MakeSpan()}, "1.2"));
  const auto& resource = document["resourceSpans"][0];
  EXPECT_EQ(resource["resource"]["attributes"][1]["value"]["stringValue"], "1.2");
  const auto& spans = resource["scopeSpans"][0]["spans"];
  ASSERT_EQ(spans.size(), 2);
  EXPECT_EQ(spans[0]["parentSpanId"], std::string(16, 'b'));
  EXPECT_EQ(spans[0]["startTimeUnixNano"], "1000");
  EXPECT_EQ(spans[0]["attributes"][0]["value"]["stringValue"], "me");
  EXPECT_EQ(spans[0]["status"]["code"], 2);
  EXPECT_EQ(spans[1]["name"], "kernel");
  EXPECT_EQ(spans[1]["parentSpanId"], spans[0]["spanId"]);
  EXPECT_EQ(spans[1]["traceId"], std::string(32, 'a'));
  EXPECT_EQ(spans[1]["endTimeUnixNano"], "3000");
}

TEST(SpanExport, RefusesWhatIsNoAddressOfACollector) {
  EXPECT_TRUE(SpanExport::CheckEndpoint("http://[::1]:4318/").ok());
  for (const char* endpoint :
       {"", "127.0.0.1:4318", "https://host:4318", "http://host", "http://:1", "http://host:0",
        "http://host:65536", "http://host:4318/v1/traces"}) {
    EXPECT_FALSE(SpanExport::Start(endpoint, "1.2").ok()) << endpoint;
  }
}

// A POST is counted before the next one begins.
TEST(SpanExport, CountsWhatTheCollectorTookAndWhatItDidNot) {
  SpanCollector collector;
  auto spans = SpanExport::Start(collector.endpoint(), "1.2");
  ASSERT_TRUE(spans.ok());
  const auto add = [&] {
    for (size_t n = 0; n < SpanExport::kMostAtOnce; ++n) (*spans)->Add(MakeSpan());
  };
  add();
  collector.Posted(1);
  collector.AnswerWith("503 Service Unavailable");
  add();
  collector.Posted(2);
  EXPECT_EQ((*spans)->exported(), SpanExport::kMostAtOnce);
  add();
  collector.Posted(3);
  EXPECT_EQ((*spans)->exported(), SpanExport::kMostAtOnce);
  EXPECT_GE((*spans)->dropped(), SpanExport::kMostAtOnce);
}

}  // namespace
}  // namespace attnd
