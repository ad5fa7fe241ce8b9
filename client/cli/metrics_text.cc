#include "client/cli/metrics_text.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

bool Includes(const Labels& all, const Labels& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const auto& label) {
    auto it = all.find(label.first);
    return it != all.end() && it->second == label.second;
  });
}

bool ParseValue(absl::string_view text, double& value) {
  if (text == "+Inf") {
    value = std::numeric_limits<double>::infinity();
    return true;
  }
  return absl::SimpleAtod(text, &value);
}

// key="value",... up to the closing brace, with \\, \" and \n escaped; takes them off `line`.
bool ParseLabels(absl::string_view& line, Labels& labels) {
  while (!absl::ConsumePrefix(&line, "}")) {
    size_t equals = line.find("=\"");
    if (equals == absl::string_view::npos) return false;
    std::string key(absl::StripAsciiWhitespace(line.substr(0, equals))), value;
    line.remove_prefix(equals + 2);
    while (!line.empty() && line[0] != '"') {
      bool escaped = line[0] == '\\' && line.size() > 1;
      char c = escaped ? line[1] : line[0];
      value += escaped && c == 'n' ? '\n' : c;
      line.remove_prefix(escaped ? 2 : 1);
    }
    if (!absl::ConsumePrefix(&line, "\"")) return false;
    absl::ConsumePrefix(&line, ",");
    labels[key] = value;
  }
  return true;
}

bool ParseSample(absl::string_view line, MetricSample& sample) {
  size_t end = line.find_first_of("{ ");
  if (end == absl::string_view::npos || end == 0) return false;
  sample.name = std::string(line.substr(0, end));
  line.remove_prefix(end);
  if (absl::ConsumePrefix(&line, "{") && !ParseLabels(line, sample.labels)) return false;
  // A timestamp may follow the value.
  std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  return !words.empty() && ParseValue(words[0], sample.value);
}

}  // namespace

absl::StatusOr<MetricsText> MetricsText::Parse(absl::string_view text) {
  MetricsText metrics;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') continue;
    MetricSample sample;
    if (!ParseSample(line, sample)) {
      return absl::InvalidArgumentError(
          absl::StrCat("metrics: expected a sample, got ", line.substr(0, 100)));
    }
    metrics.samples_.push_back(std::move(sample));
  }
  return metrics;
}

double MetricsText::Sum(absl::string_view name, const Labels& labels) const {
  double sum = 0;
  for (const MetricSample& s : samples_) {
    if (s.name == name && Includes(s.labels, labels)) sum += s.value;
  }
  return sum;
}

std::vector<std::string> MetricsText::ValuesOf(absl::string_view name,
                                               const std::string& label) const {
  std::set<std::string> values;
  for (const MetricSample& s : samples_) {
    auto it = s.labels.find(label);
    if (s.name == name && it != s.labels.end()) values.insert(it->second);
  }
  return {values.begin(), values.end()};
}

std::map<double, double> MetricsText::Buckets(absl::string_view histogram,
                                              const Labels& labels) const {
  std::map<double, double> buckets;
  std::string name = absl::StrCat(histogram, "_bucket");
  for (const MetricSample& s : samples_) {
    auto bound = s.labels.find("le");
    double upper;
    if (s.name != name || bound == s.labels.end() || !Includes(s.labels, labels)) continue;
    if (ParseValue(bound->second, upper)) buckets[upper] += s.value;
  }
  return buckets;
}

double QuantileBetween(const std::map<double, double>& before, const std::map<double, double>& now,
                       double q) {
  std::vector<std::pair<double, double>> delta;  // upper bound, cumulative count
  for (const auto& [bound, count] : now) {
    auto it = before.find(bound);
    double earlier = it == before.end() ? 0 : it->second;
    // After a restart the counts are smaller: all of them are new.
    delta.emplace_back(bound, count >= earlier ? count - earlier : count);
  }
  if (delta.empty() || delta.back().second <= 0) return std::nan("");
  double rank = q * delta.back().second, lower = 0, below = 0;
  for (const auto& [bound, count] : delta) {
    if (count >= rank) {
      if (std::isinf(bound)) return lower;
      return count == below ? bound : lower + (bound - lower) * (rank - below) / (count - below);
    }
    lower = bound;
    below = count;
  }
  return lower;
}

}  // namespace attnd
