// SampledMetrics: gauges and counters whose value is asked for at each scrape, for what is known
// elsewhere already (memory in use, queue estimate, the process itself). Any thread.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace attnd {

class SampledMetrics final : public prometheus::Collectable {
 public:
  using Labels = std::map<std::string, std::string>;

  // The series has a row in metric_list.h; `value` is called from the metrics port's threads.
  void AddGauge(const std::string& name, Labels labels, std::function<double()> value);
  void AddCounter(const std::string& name, Labels labels, std::function<double()> value);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  struct Child {
    Labels labels;
    std::function<double()> value;
  };
  struct Series {
    std::string help;
    prometheus::MetricType type;
    std::vector<Child> children;
  };
  mutable std::mutex mutex_;
  std::map<std::string, Series> by_name_;  // guarded by mutex_
};

// process_cpu_seconds_total, process_resident_memory_bytes, process_virtual_memory_bytes,
// process_open_fds, process_max_fds, process_start_time_seconds, process_threads, from /proc/self.
void AddProcessMetrics(SampledMetrics& metrics);

}  // namespace attnd
