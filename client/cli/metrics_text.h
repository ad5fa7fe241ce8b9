// MetricsText: Prometheus's text format, as far as `attnctl top` reads it: samples with labels, and
// quantiles of classic histograms.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attnd {

using Labels = std::map<std::string, std::string>;

struct MetricSample {
  std::string name;
  Labels labels;
  double value;
};

class MetricsText {
 public:
  // INVALID_ARGUMENT with the line that cannot be read.
  static absl::StatusOr<MetricsText> Parse(absl::string_view text);

  // The sum of the samples with this name whose labels include `labels`.
  double Sum(absl::string_view name, const Labels& labels = {}) const;
  // The values that a label takes under a name.
  std::vector<std::string> ValuesOf(absl::string_view name, const std::string& label) const;
  // Cumulative counts by upper bound, over all samples of a histogram that match.
  std::map<double, double> Buckets(absl::string_view histogram, const Labels& labels) const;

 private:
  std::vector<MetricSample> samples_;
};

// The q-quantile of what a histogram gained between two samples, interpolated within its bucket as
// Prometheus does; NaN when it gained nothing.
double QuantileBetween(const std::map<double, double>& before, const std::map<double, double>& now,
                       double q);

// Returns what is wrong with the URL, empty if nothing: the form of CLI11's validators.
std::string CheckMetricsUrl(const std::string& url);

// For https alone.
struct MetricsAccess {
  std::string ca_file;  // empty: the system's authorities
  std::string token;    // sent as "authorization: Bearer ...", unless it is empty
};

// GET of "http://host:port/path" or https. UNAVAILABLE without an answer; at most 16 MiB.
absl::StatusOr<std::string> FetchMetrics(const std::string& url, absl::Duration timeout,
                                         const MetricsAccess& access = {});

}  // namespace attnd
