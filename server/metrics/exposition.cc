#include "server/metrics/exposition.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace attnd {
namespace {

constexpr double kExactIntegers = 1e15;  // of the 16 digits that are written
constexpr size_t kBytesPerSeries = 100;

const char* TypeName(prometheus::MetricType type) {
  switch (type) {
    case prometheus::MetricType::Counter:
      return "counter";
    case prometheus::MetricType::Gauge:
      return "gauge";
    case prometheus::MetricType::Summary:
      return "summary";
    case prometheus::MetricType::Histogram:
      return "histogram";
    default:
      return "untyped";
  }
}

void AddNumber(double value, std::string& out) {
  if (std::isnan(value)) {
    out += "Nan";
  } else if (std::isinf(value)) {
    out += value < 0 ? "-Inf" : "+Inf";
  } else if (std::fabs(value) < kExactIntegers && value == std::trunc(value) &&
             !(value == 0 && std::signbit(value))) {
    absl::StrAppend(&out, static_cast<int64_t>(value));
  } else {
    absl::StrAppendFormat(&out, "%.16g", value);
  }
}

void AddLabel(absl::string_view name, absl::string_view value, std::string& out) {
  absl::StrAppend(&out, name, "=\"");
  for (const char c : value) {
    if (c == '\n') {
      out += "\\n";
    } else {
      if (c == '\\' || c == '"') out += '\\';
      out += c;
    }
  }
  out += '"';
}

// One series, up to its value. `bound`: of a histogram's bucket or a summary's quantile, if
// `bound_name` is not empty.
void AddSeries(absl::string_view name, absl::string_view suffix,
               const prometheus::ClientMetric& metric, absl::string_view bound_name, double bound,
               std::string& out) {
  absl::StrAppend(&out, name, suffix);
  char before = '{';
  for (const prometheus::ClientMetric::Label& label : metric.label) {
    out += before;
    AddLabel(label.name, label.value, out);
    before = ',';
  }
  if (!bound_name.empty()) {
    absl::StrAppend(&out, absl::string_view(&before, 1), bound_name, "=\"");
    AddNumber(bound, out);
    out += '"';
    before = ',';
  }
  out += before == '{' ? " " : "} ";
}

void EndSeries(const prometheus::ClientMetric& metric, double value, std::string& out) {
  AddNumber(value, out);
  if (metric.timestamp_ms != 0) absl::StrAppend(&out, " ", metric.timestamp_ms);
  out += '\n';
}

void AddHistogram(const std::string& name, const prometheus::ClientMetric& metric,
                  std::string& out) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto& histogram = metric.histogram;
  const auto count = static_cast<double>(histogram.sample_count);
  AddSeries(name, "_count", metric, "", 0, out);
  EndSeries(metric, count, out);
  AddSeries(name, "_sum", metric, "", 0, out);
  EndSeries(metric, histogram.sample_sum, out);
  double last = -kInfinity;
  for (const prometheus::ClientMetric::Bucket& bucket : histogram.bucket) {
    AddSeries(name, "_bucket", metric, "le", bucket.upper_bound, out);
    EndSeries(metric, static_cast<double>(bucket.cumulative_count), out);
    last = bucket.upper_bound;
  }
  if (last == kInfinity) return;
  AddSeries(name, "_bucket", metric, "le", kInfinity, out);
  EndSeries(metric, count, out);
}

void AddSummary(const std::string& name, const prometheus::ClientMetric& metric, std::string& out) {
  const auto& summary = metric.summary;
  AddSeries(name, "_count", metric, "", 0, out);
  EndSeries(metric, static_cast<double>(summary.sample_count), out);
  AddSeries(name, "_sum", metric, "", 0, out);
  EndSeries(metric, summary.sample_sum, out);
  for (const prometheus::ClientMetric::Quantile& quantile : summary.quantile) {
    AddSeries(name, "", metric, "quantile", quantile.quantile, out);
    EndSeries(metric, quantile.value, out);
  }
}

void AddMetric(const prometheus::MetricFamily& family, const prometheus::ClientMetric& metric,
               std::string& out) {
  switch (family.type) {
    case prometheus::MetricType::Histogram:
      return AddHistogram(family.name, metric, out);
    case prometheus::MetricType::Summary:
      return AddSummary(family.name, metric, out);
    default:
      break;
  }
  AddSeries(family.name, "", metric, "", 0, out);
  EndSeries(metric,
            family.type == prometheus::MetricType::Counter ? metric.counter.value
            : family.type == prometheus::MetricType::Gauge ? metric.gauge.value
                                                           : metric.untyped.value,
            out);
}

}  // namespace

std::string Exposition(const std::vector<prometheus::MetricFamily>& families) {
  size_t series = 0;
  for (const prometheus::MetricFamily& family : families) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      series += 3 + metric.histogram.bucket.size() + metric.summary.quantile.size();
    }
  }
  std::string out;
  out.reserve(series * kBytesPerSeries);
  for (const prometheus::MetricFamily& family : families) {
    if (!family.help.empty()) {
      absl::StrAppend(&out, "# HELP ", family.name, " ", family.help, "\n");
    }
    absl::StrAppend(&out, "# TYPE ", family.name, " ", TypeName(family.type), "\n");
    for (const prometheus::ClientMetric& metric : family.metric) AddMetric(family, metric, out);
  }
  return out;
}

}  // namespace attnd
