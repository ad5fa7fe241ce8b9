// LoadFlags: the flags of programs that load a daemon with calls of one shape: where it is, and the
// shape, float16.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "attention/problem.h"
#include "base/check.h"
#include "client/cli/metrics_text.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {

struct LoadFlags {
  std::string address, metrics;
  int64_t length, heads, head_dim = 64;

  void Add(CLI::App& app) {
    app.add_option("--address", address, "of the daemon")->required();
    app.add_option("--metrics", metrics, "URL of its metrics");
    app.add_option("--length", length, "N, the longest if there are several");
    app.add_option("--heads", heads, "H");
    app.add_option("--head_dim", head_dim, "D");
  }

  // Makes a request of that length, if there are several.
  v1::ForwardRequest Request(int64_t call_length) const {
    Problem problem = SmallProblem(call_length, heads);
    problem.qk_head_dim = problem.v_head_dim = head_dim;
    problem.element = ElementType::kFloat16;
    return MakeForward(problem, 1);
  }
};

// The daemon's metrics at `url`; what fails ends the program.
inline MetricsText Scrape(const std::string& url) {
  const absl::StatusOr<std::string> text = FetchMetrics(url, absl::Seconds(5));
  CHECK(text.ok()) << text.status();
  absl::StatusOr<MetricsText> metrics = MetricsText::Parse(*text);
  CHECK(metrics.ok()) << metrics.status();
  return *std::move(metrics);
}

}  // namespace attnd
