#include "client/cli/metrics_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/top_frame.h"

namespace attnd {
namespace {

constexpr char kBefore[] = R"(
# HELP attnd_requests_total Calls answered.
# TYPE attnd_requests_total counter
attnd_requests_total{method="Forward",code="OK"} 100
attnd_requests_total{method="Forward",code="UNAVAILABLE"} 2
attnd_requests_in_flight{method="Forward"} 0
attnd_request_duration_seconds_bucket{method="Forward",le="0.001"} 50
attnd_request_duration_seconds_bucket{method="Forward",le="0.01"} 100
attnd_request_duration_seconds_bucket{method="Forward",le="+Inf"} 102
attnd_received_bytes_total{transport="tcp"} 1000
attnd_received_bytes_total{transport="uds"} 500
attnd_lease_lookups_total{result="hit"} 4
attnd_lease_lookups_total{result="expired"} 1
attnd_ready{device="0"} 1
)";

constexpr char kAfter[] = R"(
attnd_requests_total{method="Forward",code="OK"} 120 1700000000000
attnd_requests_total{method="Forward",code="UNAVAILABLE"} 6
attnd_requests_in_flight{method="Forward"} 3
attnd_request_duration_seconds_bucket{method="Forward",le="0.001"} 60
attnd_request_duration_seconds_bucket{method="Forward",le="0.01"} 122
attnd_request_duration_seconds_bucket{method="Forward",le="+Inf"} 126
attnd_received_bytes_total{transport="tcp"} 3000
attnd_received_bytes_total{transport="uds"} 500
attnd_leases_active{device="cpu"} 3
attnd_lease_bytes{device="cpu"} 3072
attnd_lease_lookups_total{result="hit"} 10
attnd_lease_lookups_total{result="expired"} 2
attnd_ready{device="0"} 1
)";

MetricsText ParsedMetrics(absl::string_view text) {
  absl::StatusOr<MetricsText> metrics = MetricsText::Parse(text);
  EXPECT_TRUE(metrics.ok()) << metrics.status();
  return *std::move(metrics);
}

TEST(MetricsText, SumsSamplesThatMatch) {
  MetricsText metrics = ParsedMetrics(kBefore);
  EXPECT_EQ(metrics.Sum("attnd_requests_total"), 102);
  EXPECT_EQ(metrics.Sum("attnd_requests_total", {{"code", "OK"}}), 100);
  EXPECT_EQ(metrics.Sum("attnd_requests_total", {{"code", "NONE"}}), 0);
  EXPECT_EQ(metrics.Sum("attnd_received_bytes_total"), 1500);
  EXPECT_EQ(metrics.ValuesOf("attnd_requests_total", "code"),
            (std::vector<std::string>{"OK", "UNAVAILABLE"}));
}

TEST(MetricsText, ReadsEscapedLabelsAndRefusesWhatIsNoSample) {
  MetricsText metrics = ParsedMetrics("a{x=\"q\\\"\\\\\\n}\",y=\"2\"} 1e3\nb 2\n");
  EXPECT_EQ(metrics.Sum("a", {{"x", "q\"\\\n}"}, {"y", "2"}}), 1000);
  EXPECT_EQ(metrics.Sum("b"), 2);
  for (const char* wrong : {"a", "a{x=\"1\" 2", "a{x=1} 2", "a{x=\"1\"}", "{} 1", "a x"}) {
    EXPECT_FALSE(MetricsText::Parse(wrong).ok()) << wrong;
  }
}

TEST(Quantile, InterpolatesWithinItsBucket) {
  std::map<double, double> before = {{1, 0}, {2, 0}, {INFINITY, 0}};
  std::map<double, double> now = {{1, 50}, {2, 100}, {INFINITY, 100}};
  EXPECT_DOUBLE_EQ(QuantileBetween(before, now, 0.5), 1);
  EXPECT_DOUBLE_EQ(QuantileBetween(before, now, 0.75), 1.5);
  EXPECT_DOUBLE_EQ(QuantileBetween(before, now, 0.99), 1.98);
  EXPECT_TRUE(std::isnan(QuantileBetween(now, now, 0.5)));
  now[INFINITY] = 1000;  // beyond the last bound: that bound
  EXPECT_DOUBLE_EQ(QuantileBetween(before, now, 0.99), 2);
  // After a restart the counts are smaller: all of them are new.
  EXPECT_DOUBLE_EQ(QuantileBetween({{1, 500}, {2, 500}}, {{1, 10}, {2, 20}}, 0.75), 1.5);
}

TEST(TopFrame, TellsRatesBetweenTwoLooks) {
  TopFrame frame =
      TopFrame::Between(ParsedMetrics(kBefore), ParsedMetrics(kAfter), absl::Seconds(2));
  ASSERT_EQ(frame.methods.size(), 1u);
  const MethodRow& row = frame.methods[0];
  EXPECT_EQ(row.method, "Forward");
  EXPECT_DOUBLE_EQ(row.calls_per_second, 12);
  EXPECT_DOUBLE_EQ(row.errors_per_second, 2);
  EXPECT_DOUBLE_EQ(row.in_flight, 3);
  EXPECT_NEAR(row.p50_seconds, 0.001 + 0.009 * 2 / 12, 1e-12);
  EXPECT_DOUBLE_EQ(frame.received_per_second, 1000);
  EXPECT_EQ(frame.leases, 3);
  EXPECT_EQ(frame.lease_bytes, 3072);
  EXPECT_DOUBLE_EQ(frame.lease_hits_per_second, 3);
  EXPECT_DOUBLE_EQ(frame.lease_misses_per_second, 0.5);
  EXPECT_TRUE(frame.ready);
  std::ostringstream text;
  frame.Print(text, false, 60);
  EXPECT_TRUE(absl::StrContains(text.str(), "READY")) << text.str();
  EXPECT_TRUE(absl::StrContains(text.str(), "Forward")) << text.str();
  EXPECT_EQ(text.str().find('\033'), std::string::npos);
  EXPECT_EQ(frame.ToJson()["methods"][0]["calls_per_second"], 12);
  // Nothing has happened: no quantiles, and none in the JSON.
  TopFrame quiet =
      TopFrame::Between(ParsedMetrics(kAfter), ParsedMetrics(kAfter), absl::Seconds(2));
  EXPECT_TRUE(std::isnan(quiet.methods[0].p50_seconds));
  EXPECT_TRUE(quiet.ToJson()["methods"][0]["p50_seconds"].is_null());
}

TEST(TopFrame, ShowsTheWorkOfModulesBesideThatOfAttention) {
  constexpr char kModules[] = R"(
attnd_gpu_up{device="cpu"} 1
attnd_kernel_flops_total{device="cpu",direction="forward"} 2e9
attnd_module_flops_total{device="cpu",direction="forward"} 100e9
attnd_module_flops_total{device="cpu",direction="backward"} 188e9
attnd_modules 3
attnd_module_bytes{device="cpu",kind="weight"} 1048576
attnd_module_bytes{device="cpu",kind="optimizer"} 1048576
attnd_module_rows_total{direction="forward"} 64
attnd_steps_total{result="applied"} 4
attnd_steps_total{result="skipped"} 8
attnd_module_calls_total{code="OK",method="Backward"} 10
attnd_module_calls_total{code="UNAVAILABLE",method="Backward"} 2
attnd_module_duration_seconds_bucket{direction="backward",stage="compute",le="0.1"} 10
attnd_module_duration_seconds_bucket{direction="backward",stage="compute",le="+Inf"} 10
attnd_module_duration_seconds_bucket{direction="backward",stage="queue",le="0.1"} 0
attnd_module_duration_seconds_bucket{direction="backward",stage="queue",le="+Inf"} 10
)";
  const TopFrame frame =
      TopFrame::Between(ParsedMetrics(""), ParsedMetrics(kModules), absl::Seconds(2));
  EXPECT_EQ(frame.flops_per_second, 145e9);
  EXPECT_EQ(frame.devices[0].flops_per_second, 145e9);
  ASSERT_EQ(frame.methods.size(), 1u);
  EXPECT_EQ(frame.methods[0].method, "module Backward");
  EXPECT_EQ(frame.methods[0].calls_per_second, 6);
  EXPECT_EQ(frame.methods[0].errors_per_second, 1);
  EXPECT_DOUBLE_EQ(frame.methods[0].p50_seconds, 0.05);
  std::ostringstream text;
  frame.Print(text, false, 60);
  for (const char* shown : {"modules 3, 2.00 MiB", "rows 32/s", "steps 2/s", "module Backward"}) {
    EXPECT_TRUE(absl::StrContains(text.str(), shown)) << shown << "\n" << text.str();
  }
  EXPECT_EQ(frame.ToJson()["module_flops_per_second"], 144e9);
}

TEST(TopFrame, ShowsEachDeviceWithItsMemoryAndWhatItsStreamsDo) {
  constexpr char kGpus[] = R"(
attnd_gpu_up{device="gpu0"} 1
attnd_gpu_up{device="gpu1"} 0
attnd_kernel_flops_total{device="gpu0",direction="forward"} 4e12
attnd_hbm_pool_reserved_bytes{device="gpu0"} 1000
attnd_hbm_pool_used_bytes{device="gpu0",purpose="input"} 300
attnd_hbm_pool_used_bytes{device="gpu0",purpose="output"} 200
attnd_hbm_pool_used_bytes{device="gpu0",purpose="lease"} 100
attnd_leases_active{device="gpu0"} 7
attnd_stream_busy_seconds_total{device="gpu0",role="compute"} 1.5
)";
  TopFrame frame = TopFrame::Between(ParsedMetrics(""), ParsedMetrics(kGpus), absl::Seconds(2));
  ASSERT_EQ(frame.devices.size(), 2u);
  EXPECT_TRUE(frame.devices[0].up);
  EXPECT_FALSE(frame.devices[1].up);
  EXPECT_EQ(frame.devices[0].flops_per_second, 2e12);
  EXPECT_EQ(frame.devices[0].compute_busy, 0.75);
  EXPECT_EQ(frame.devices[0].hbm_input_bytes, 300);
  EXPECT_EQ(frame.devices[0].hbm_lease_bytes, 100);
  EXPECT_EQ(frame.devices[0].leases, 7);
  std::ostringstream text;
  frame.Print(text, false, 60);
  EXPECT_NE(text.str().find("LOST"), std::string::npos) << text.str();
  EXPECT_NE(text.str().find("compute [########..] 75%"), std::string::npos) << text.str();
  EXPECT_EQ(frame.ToJson()["devices"][0]["hbm_reserved_bytes"], 1000);
}

size_t Columns(const std::string& line) {
  return std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; });
}

// Makes the metrics of a busy daemon with two GPUs and many callers, whose names are as long as
// they come.
std::string BusyMetrics() {
  std::string text;
  const std::string name(40, 'n');
  for (const char* method : {"Forward", "ReleaseResidual", "AMethodOfTomorrow"}) {
    absl::StrAppend(&text, "attnd_requests_total{method=\"", method, "\",code=\"OK\"} 987654\n",
                    "attnd_requests_total{method=\"", method, "\",code=\"INTERNAL\"} 98765\n",
                    "attnd_requests_in_flight{method=\"", method, "\"} 1024\n",
                    "attnd_request_duration_seconds_bucket{method=\"", method,
                    "\",le=\"0.0999\"} 10\n");
  }
  absl::StrAppend(&text, "attnd_requests_total{method=\"Idle\",code=\"OK\"} 0\n");
  for (const std::string& device : {std::string("gpu0"), name}) {
    const std::string label = absl::StrCat("{device=\"", device, "\"");
    absl::StrAppend(&text, "attnd_gpu_up", label, "} 1\n");
    absl::StrAppend(&text, "attnd_kernel_flops_total", label, ",direction=\"forward\"} 1.23e14\n");
    absl::StrAppend(&text, "attnd_queue_estimated_seconds", label, "} 29.99\n");
    absl::StrAppend(&text, "attnd_hbm_pool_reserved_bytes", label, "} 7e10\n");
    for (const char* purpose : {"input", "output", "workspace", "lease"}) {
      absl::StrAppend(&text, "attnd_hbm_pool_used_bytes", label, ",purpose=\"", purpose,
                      "\"} 1.7e10\n");
    }
  }
  for (int n = 0; n < 14; ++n) {
    const std::string label = absl::StrCat("{caller=\"", n, name, "\"");
    absl::StrAppend(&text, "attnd_caller_requests_total", label, ",result=\"error\"} 123456\n");
    absl::StrAppend(&text, "attnd_caller_bytes_total", label, ",direction=\"sent\"} 1e12\n");
    absl::StrAppend(&text, "attnd_caller_compute_seconds_total", label, "} ", n, "\n");
  }
  absl::StrAppend(&text, "attnd_received_bytes_total{transport=\"tcp\"} 1.1e12\n",
                  "attnd_staging_pool_capacity_bytes 4.1e12\nattnd_ready 1\n");
  return text;
}

TEST(TopFrame, FitsAnyWidthFromSixtyColumnsAndHidesWhatIsIdle) {
  const TopFrame frame =
      TopFrame::Between(ParsedMetrics(""), ParsedMetrics(BusyMetrics()), absl::Seconds(1));
  for (int columns = 60; columns <= 200; ++columns) {
    std::ostringstream text;
    frame.Print(text, false, columns);
    std::istringstream lines(text.str());
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(Columns(line), static_cast<size_t>(columns)) << line;
    }
    EXPECT_FALSE(absl::StrContains(text.str(), "Idle")) << text.str();
    EXPECT_TRUE(absl::StrContains(text.str(), "and 4 more")) << text.str();
  }
}

TEST(TopFrame, ListsCallersByWhatTheyCompute) {
  constexpr char kCallers[] = R"(
attnd_caller_requests_total{caller="small",result="ok"} 20
attnd_caller_requests_total{caller="small",result="error"} 4
attnd_caller_bytes_total{caller="small",direction="received"} 3000
attnd_caller_bytes_total{caller="small",direction="sent"} 1000
attnd_caller_compute_seconds_total{caller="small"} 0.5
attnd_caller_requests_total{caller="large",result="ok"} 2
attnd_caller_compute_seconds_total{caller="large"} 1.5
)";
  const TopFrame frame =
      TopFrame::Between(ParsedMetrics(""), ParsedMetrics(kCallers), absl::Seconds(2));
  ASSERT_EQ(frame.callers.size(), 2u);
  EXPECT_EQ(frame.callers[0].caller, "large");
  EXPECT_EQ(frame.callers[0].compute, 0.75);
  EXPECT_EQ(frame.callers[1].calls_per_second, 12);
  EXPECT_EQ(frame.callers[1].errors_per_second, 2);
  EXPECT_EQ(frame.callers[1].bytes_per_second, 2000);
  EXPECT_EQ(frame.ToJson()["callers"][0]["compute"], 0.75);
  std::ostringstream text;
  frame.Print(text, false, 60);
  EXPECT_TRUE(absl::StrContains(text.str(), "[#####.] 75%")) << text.str();
}

// Metrics cannot send control sequences to the terminal.
TEST(TopFrame, PrintsNoControlCharacters) {
  auto before = MetricsText::Parse("");
  auto metrics = MetricsText::Parse(
      "attnd_requests_total{method=\"For\033[2Jward\",code=\"OK\"} 1\n"
      "attnd_gpu_up{device=\"\x9b"
      "31m\"} 1\n");
  ASSERT_TRUE(metrics.ok());
  std::ostringstream text;
  TopFrame::Between(*before, *metrics, absl::Seconds(1)).Print(text, false, 60);
  EXPECT_TRUE(absl::StrContains(text.str(), "For\\x1b[2Jward")) << text.str();
  EXPECT_TRUE(absl::StrContains(text.str(), "\\x9b31m")) << text.str();
}

TEST(FetchMetrics, SaysWhoDoesNotAnswer) {
  EXPECT_EQ(FetchMetrics("http://127.0.0.1:1/metrics", absl::Seconds(1)).status(),
            absl::UnavailableError("--metrics: no answer from 127.0.0.1:1"));
}

TEST(CheckMetricsUrl, TakesHttpAndHttps) {
  EXPECT_EQ(CheckMetricsUrl("http://127.0.0.1:9464/metrics"), "");
  EXPECT_EQ(CheckMetricsUrl("gpu7:9464"), "");
  EXPECT_EQ(CheckMetricsUrl("https://gpu7:9464"), "");
  EXPECT_EQ(CheckMetricsUrl("ftp://gpu7:9464"),
            "expected http://HOST:PORT/PATH or https://..., got ftp://gpu7:9464");
}

}  // namespace
}  // namespace attnd
