#include "tests/emulator/kernels/find_emulated_kernel.h"

#include <map>
#include <string>

#include "base/check.h"
#include "tests/emulator/kernels/emulated_rows.h"

namespace attnd {
namespace {

using KernelsByName = std::map<std::string, EmulatedKernel>;
KernelsByName& AllEmulatedKernels() {
  static KernelsByName& kernels = *new KernelsByName;
  return kernels;
}

}  // namespace

EmulatedKernel FindEmulatedKernel(const KernelRow& row) {
  const KernelsByName& kernels = AllEmulatedKernels();
  const auto found = kernels.find(EmulatedName(row));
  return found == kernels.end() ? EmulatedKernel{} : found->second;
}

bool AddEmulatedKernels(std::initializer_list<NamedEmulatedKernel> kernels) {
  for (const auto& [name, kernel] : kernels) {
    CHECK(AllEmulatedKernels().emplace(name, kernel).second) << name;
  }
  return true;
}

}  // namespace attnd
