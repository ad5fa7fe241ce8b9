#include "base/cpu_quota.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/read_file.h"

namespace attnd {
namespace {

// "max 100000" or "150000 100000" (v2: quota and period in microseconds). 0: no limit.
double ParseCpuMax(const std::string& text) {
  std::vector<std::string> words = absl::StrSplit(text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  double quota = 0, period = 0;
  if (words.size() < 2 || !absl::SimpleAtod(words[0], &quota) ||
      !absl::SimpleAtod(words[1], &period) || period <= 0) {
    return 0;
  }
  return quota / period;
}

double QuotaOfDirectory(const std::string& directory, bool version_2) {
  if (version_2) return ParseCpuMax(ReadFile(directory + "/cpu.max"));
  double cpus = ParseCpuMax(absl::StrCat(ReadFile(directory + "/cpu.cfs_quota_us"), " ",
                                         ReadFile(directory + "/cpu.cfs_period_us")));
  return cpus > 0 ? cpus : 0;  // v1 writes −1 for none
}

double SmallestAlongPath(const std::string& mount, std::string path, bool version_2) {
  double smallest = 0;
  while (true) {
    double cpus = QuotaOfDirectory(mount + path, version_2);
    if (cpus > 0 && (smallest == 0 || cpus < smallest)) smallest = cpus;
    if (path.empty() || path == "/") return smallest;
    path.resize(path.rfind('/'));
  }
}

}  // namespace

double CgroupCpuQuota(const std::string& root, const std::string& self_cgroup) {
  double smallest = 0;
  for (absl::string_view line : absl::StrSplit(self_cgroup, '\n', absl::SkipEmpty())) {
    std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    bool version_2 = fields[1].empty();
    bool cpu_v1 = std::find(controllers.begin(), controllers.end(), "cpu") != controllers.end();
    if (!version_2 && !cpu_v1) continue;
    double cpus =
        SmallestAlongPath(version_2 ? root : absl::StrCat(root, "/cpu"), fields[2], version_2);
    if (cpus > 0 && (smallest == 0 || cpus < smallest)) smallest = cpus;
  }
  return smallest;
}

int AvailableCpus() {
  cpu_set_t affinity;
  int cpus = sched_getaffinity(0, sizeof(affinity), &affinity) == 0 ? CPU_COUNT(&affinity) : 1;
  double quota = CgroupCpuQuota("/sys/fs/cgroup", ReadFile("/proc/self/cgroup"));
  if (quota > 0) cpus = std::min(cpus, static_cast<int>(std::ceil(quota)));
  return std::max(cpus, 1);
}

}  // namespace attnd
