#include "server/metrics/trace_context.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

constexpr char kTraceId[] = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr char kSpanId[] = "00f067aa0ba902b7";

std::string Traceparent(const std::string& version, const std::string& flags) {
  return absl::StrCat(version, "-", kTraceId, "-", kSpanId, "-", flags);
}

TEST(TraceContext, ReadsTraceParentAndSampling) {
  const TraceContext trace = ParseTraceparent(Traceparent("00", "01"));
  EXPECT_EQ(trace.trace_id, kTraceId);
  EXPECT_EQ(trace.parent_id, kSpanId);
  EXPECT_TRUE(trace.sampled);
  EXPECT_FALSE(ParseTraceparent(Traceparent("00", "00")).sampled);
  EXPECT_FALSE(ParseTraceparent(Traceparent("00", "0e")).sampled);
  EXPECT_TRUE(ParseTraceparent(Traceparent("00", "0f")).sampled);
  EXPECT_EQ(ParseTraceparent(Traceparent("cc", "01-what-comes-later")).trace_id, kTraceId);
}

TEST(TraceContext, IsNoneWhereTheValueIsInvalid) {
  const std::string zeros(32, '0');
  for (const std::string& text :
       {std::string(), Traceparent("ff", "01"), Traceparent("0x", "01"), Traceparent("00", "0g"),
        Traceparent("00", "01-more"), Traceparent("00", "0"), Traceparent("cc", "01more"),
        absl::StrCat("00-", zeros, "-", kSpanId, "-01"),
        absl::StrCat("00-", kTraceId, "-", zeros.substr(16), "-01"),
        absl::StrCat("00-", std::string(32, 'A'), "-", kSpanId, "-01"),
        absl::StrCat("00_", kTraceId, "_", kSpanId, "_01")}) {
    const TraceContext trace = ParseTraceparent(text);
    EXPECT_TRUE(trace.trace_id.empty() && trace.parent_id.empty() && !trace.sampled) << text;
  }
}

}  // namespace
}  // namespace attnd
