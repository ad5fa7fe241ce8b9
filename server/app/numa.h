// Numa: which memory node a PCI device is attached to, and memory on chosen nodes. Without libnuma:
// sysfs and the kernel's mbind(2). A machine with one node has nothing to choose. Any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace attnd {

// "0000:3B:00.0" or "00000000:3b:00.0" → /sys/bus/pci/devices/0000:3b:00.0/numa_node; nothing where
// that does not say. `sysfs` stands in for /sys in tests.
std::optional<int> NumaNodeOfPciDevice(const std::string& pci_bus_id,
                                       const std::string& sysfs = "/sys");

// Nodes that have memory, in order; at least one.
std::vector<int> NumaNodes(const std::string& sysfs = "/sys");

// From now on pages of this memory that are touched for the first time come from the nodes, in turn
// if there are several, and from elsewhere only when those are full. `memory` begins a page.
// Errors: the kernel's (a container may forbid it); the memory is as good as before.
absl::Status PreferNumaNodes(absl::Span<std::byte> memory, const std::vector<int>& nodes);

}  // namespace attnd
