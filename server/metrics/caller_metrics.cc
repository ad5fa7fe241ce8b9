#include "server/metrics/caller_metrics.h"

#include "absl/strings/ascii.h"
#include "server/metrics/metric_list.h"

namespace attnd {
namespace {

constexpr char kOther[] = "other";

prometheus::Family<prometheus::Counter>& FamilyOf(prometheus::Registry& registry,
                                                  const char* name) {
  return prometheus::BuildCounter().Name(name).Help(HelpOf(name)).Register(registry);
}

std::string LabelOf(absl::string_view caller) {
  std::string label(caller.substr(0, CallerMetrics::kMaxNameBytes));
  for (char& c : label) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '_';
  }
  return label;
}

}  // namespace

CallerMetrics::CallerMetrics(prometheus::Registry& registry)
    : requests_(FamilyOf(registry, "attnd_caller_requests_total")),
      bytes_(FamilyOf(registry, "attnd_caller_bytes_total")),
      compute_seconds_(FamilyOf(registry, "attnd_caller_compute_seconds_total")) {}

const CallerMetrics::Series& CallerMetrics::SeriesOf(const std::string& name) {
  auto known = callers_.find(name);
  if (known != callers_.end()) return known->second;
  if (callers_.size() >= kMaxCallers && name != kOther) return SeriesOf(kOther);
  auto count = [&](const char* result) {
    return &requests_.Add({{"caller", name}, {"result", result}});
  };
  auto bytes = [&](const char* direction) {
    return &bytes_.Add({{"caller", name}, {"direction", direction}});
  };
  const Series made = {.ok = count("ok"),
                       .error = count("error"),
                       .received = bytes("received"),
                       .sent = bytes("sent"),
                       .compute = &compute_seconds_.Add({{"caller", name}})};
  return callers_.emplace(name, made).first->second;
}

void CallerMetrics::CallEnded(absl::string_view caller, const Call& call) {
  const std::string name = LabelOf(caller);
  absl::MutexLock lock(&mutex_);
  const Series& series = SeriesOf(name);
  (call.ok ? series.ok : series.error)->Increment();
  series.received->Increment(static_cast<double>(call.received_bytes));
  series.sent->Increment(static_cast<double>(call.sent_bytes));
  series.compute->Increment(absl::ToDoubleSeconds(call.compute));
}

}  // namespace attnd
