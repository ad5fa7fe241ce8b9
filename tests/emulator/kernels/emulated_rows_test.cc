#include "tests/emulator/kernels/emulated_rows.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <tuple>

#include "tests/emulator/kernels/find_emulated_kernel.h"

namespace attnd {
namespace {

TEST(EmulatedRows, AreThoseThatAProgramHas) {
  for (const ArchitectureInfo& info : Architectures()) {
    std::set<std::string> emulated;
    for (const KernelRow& row : EmulatedRows(info.architecture)) emulated.insert(NameOf(row));
    for (const KernelRow& row : KernelRowsOf(info.architecture)) {
      const bool has = FindEmulatedKernel(row).run != nullptr;
      EXPECT_EQ(has, emulated.contains(NameOf(row))) << EmulatedName(row);
    }
  }
}

// Each is run by some row, scores and dropout too.
TEST(EmulatedRows, HaveEachFormOfKernel) {
  const auto form = [](const KernelRow& row) {
    return std::tuple(row.kind, row.general, row.listed, row.small, row.dropout, row.ordered,
                      row.half_accumulate);
  };
  for (const ArchitectureInfo& info : Architectures()) {
    std::set<decltype(form(KernelRow()))> emulated, all;
    for (const KernelRow& row : EmulatedRows(info.architecture)) emulated.insert(form(row));
    for (const KernelRow& row : KernelRowsOf(info.architecture)) all.insert(form(row));
    EXPECT_EQ(emulated, all) << info.name;
  }
}

}  // namespace
}  // namespace attnd
