#include "server/metrics/sampled_metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <utility>

#include "server/metrics/metric_list.h"

namespace attnd {

void SampledMetrics::AddGauge(const std::string& name, Labels labels,
                              std::function<double()> value) {
  std::lock_guard<std::mutex> lock(mutex_);
  Series& series = by_name_[name];
  series.help = HelpOf(name);
  series.type = prometheus::MetricType::Gauge;
  series.children.push_back({std::move(labels), std::move(value)});
}

void SampledMetrics::AddCounter(const std::string& name, Labels labels,
                                std::function<double()> value) {
  AddGauge(name, std::move(labels), std::move(value));
  std::lock_guard<std::mutex> lock(mutex_);
  by_name_[name].type = prometheus::MetricType::Counter;
}

std::vector<prometheus::MetricFamily> SampledMetrics::Collect() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<prometheus::MetricFamily> families;
  for (const auto& [name, series] : by_name_) {
    prometheus::MetricFamily family;
    family.name = name;
    family.help = series.help;
    family.type = series.type;
    for (const Child& child : series.children) {
      prometheus::ClientMetric metric;
      for (const auto& [key, value] : child.labels) metric.label.push_back({key, value});
      metric.gauge.value = metric.counter.value = child.value();
      family.metric.push_back(std::move(metric));
    }
    families.push_back(std::move(family));
  }
  return families;
}

namespace {

// Field `number` (from 1, as proc(5) counts) of /proc/self/stat. The second, the program's name,
// may hold spaces: fields are counted from its closing bracket.
double ProcStat(int number) {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  size_t bracket = line.rfind(')');
  if (bracket == std::string::npos) return 0;
  std::istringstream fields(line.substr(bracket + 1));
  std::string field;
  for (int n = 3; n <= number; ++n) fields >> field;
  return field.empty() ? 0 : std::strtod(field.c_str(), nullptr);
}

double BootTimeSeconds() {
  std::ifstream file("/proc/stat");
  for (std::string key; file >> key;) {
    double value = 0;
    if (key == "btime" && file >> value) return value;
  }
  return 0;
}

double OpenFiles() {
  DIR* directory = opendir("/proc/self/fd");
  if (directory == nullptr) return 0;
  double count = 0;
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count - 3;  // ".", ".." and the directory itself
}

double MaxOpenFiles() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<double>(limit.rlim_cur) : 0;
}

double CpuSeconds() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

void AddProcessMetrics(SampledMetrics& metrics) {
  double page = static_cast<double>(sysconf(_SC_PAGESIZE));
  double start = BootTimeSeconds() + ProcStat(22) / static_cast<double>(sysconf(_SC_CLK_TCK));
  metrics.AddCounter("process_cpu_seconds_total", {}, CpuSeconds);
  metrics.AddGauge("process_resident_memory_bytes", {}, [page] { return ProcStat(24) * page; });
  metrics.AddGauge("process_virtual_memory_bytes", {}, [] { return ProcStat(23); });
  metrics.AddGauge("process_open_fds", {}, OpenFiles);
  metrics.AddGauge("process_max_fds", {}, MaxOpenFiles);
  metrics.AddGauge("process_start_time_seconds", {}, [start] { return start; });
  metrics.AddGauge("process_threads", {}, [] { return ProcStat(20); });
}

}  // namespace attnd
