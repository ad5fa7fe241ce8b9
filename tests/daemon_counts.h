// What the metrics port of a Daemon in this process tells.
#pragma once

#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "client/cli/metrics_text.h"
#include "tests/daemon_fixture.h"

namespace attnd {

inline ServerOptions WithMetrics(ServerOptions options = TestOptions()) {
  options.metrics_listen = "127.0.0.1:0";
  return options;
}

class Counts {
 public:
  explicit Counts(Daemon& daemon)
      : url_(absl::StrCat("http://127.0.0.1:", daemon.server().metrics_port(), "/metrics")) {}
  double Of(const char* name, const Labels& labels) const {
    auto text = FetchMetrics(url_, absl::Seconds(10));
    CHECK(text.ok()) << text.status();
    return MetricsText::Parse(*text)->Sum(name, labels);
  }
  // The daemon hears of the end of a call a moment after its caller.
  double WaitForOne(const char* name, const Labels& labels) const {
    const absl::Time until = absl::Now() + absl::Seconds(10);
    while (Of(name, labels) != 1 && absl::Now() < until) std::this_thread::yield();
    return Of(name, labels);
  }

 private:
  const std::string url_;
};

}  // namespace attnd
