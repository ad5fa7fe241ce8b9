// How many CPUs this process may use: the smaller of its affinity mask and its cgroup's CPU quota
// (v2 cpu.max, v1 cpu.cfs_quota_us), rounded up, at least 1. More threads than that would only be
// throttled.
#pragma once

#include <string>

namespace attnd {

int AvailableCpus();

// The quota found under a cgroup mount at `root` for a process whose /proc/self/cgroup reads
// `self_cgroup`: the smallest along the path to the root, in CPUs. 0: none set.
double CgroupCpuQuota(const std::string& root, const std::string& self_cgroup);

}  // namespace attnd
