#include "server/app/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace attnd {
namespace {

constexpr int kMostNodes = 1024;

// The driver gives the domain four or eight digits, sysfs has four, in small letters.
std::string SysfsName(const std::string& pci_bus_id) {
  std::string name = absl::AsciiStrToLower(pci_bus_id);
  const size_t colon = name.find(':');
  if (colon != std::string::npos && colon > 4) name = name.substr(colon - 4);
  return name;
}

}  // namespace

std::optional<int> NumaNodeOfPciDevice(const std::string& pci_bus_id, const std::string& sysfs) {
  std::ifstream file(absl::StrCat(sysfs, "/bus/pci/devices/", SysfsName(pci_bus_id), "/numa_node"));
  int node = -1;
  if (!(file >> node) || node < 0 || node >= kMostNodes) return std::nullopt;
  return node;
}

std::vector<int> NumaNodes(const std::string& sysfs) {
  std::ifstream file(absl::StrCat(sysfs, "/devices/system/node/has_memory"));
  std::string ranges;
  std::getline(file, ranges);  // "0-1,4"
  std::vector<int> nodes;
  for (absl::string_view range : absl::StrSplit(ranges, ',', absl::SkipWhitespace())) {
    std::vector<absl::string_view> ends = absl::StrSplit(range, '-');
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last)) continue;
    for (int node = first; node <= last && node < kMostNodes; ++node) nodes.push_back(node);
  }
  if (nodes.empty()) nodes.push_back(0);
  return nodes;
}

absl::Status PreferNumaNodes(absl::Span<std::byte> memory, const std::vector<int>& nodes) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kMostNodes / kBits> mask = {};
  for (int node : nodes) mask[node / kBits] |= 1UL << (node % kBits);
  // One node is preferred: binding would end the process when that node is full.
  const int policy = nodes.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
  const long result = syscall(SYS_mbind, memory.data(), memory.size(), policy, mask.data(),
                              static_cast<unsigned long>(kMostNodes), 0UL);
  if (result == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "mbind");
}

}  // namespace attnd
