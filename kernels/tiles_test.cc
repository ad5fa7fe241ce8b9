#include "kernels/tiles.h"

#include <set>
#include <string>
#include <utility>

#include "gtest/gtest.h"

namespace attnd {
namespace {

TEST(KernelRows, HaveNamesOfTheirOwnInTheirArchitecture) {
  std::set<std::pair<Architecture, std::string>> names;
  for (const KernelRow& row : KernelRows()) {
    EXPECT_TRUE(names.emplace(row.architecture, NameOf(row)).second) << NameOf(row);
  }
}

// A kernel is found by its name, and calls whose kernel has the same name share a launch.
TEST(KernelRows, HaveNamesOfTheirOwnOnEveryGpu) {
  for (int gpu : {70, 75, 80, 86, 89, 90, 100, 120}) {
    std::set<std::string> names;
    for (const KernelRow& row : KernelRowsOfGpu(gpu)) {
      EXPECT_TRUE(names.insert(NameOf(row)).second) << gpu << " " << NameOf(row);
    }
  }
}

TEST(KernelRows, BelongToOneArchitectureEach) {
  size_t count = 0;
  for (const ArchitectureInfo& info : Architectures()) {
    const std::vector<KernelRow> rows = KernelRowsOf(info.architecture);
    EXPECT_FALSE(rows.empty()) << info.name;
    for (const KernelRow& row : rows) EXPECT_EQ(row.architecture, info.architecture);
    count += rows.size();
  }
  EXPECT_EQ(count, KernelRows().size());
}

TEST(Architectures, AreListedOldestFirstWithTheirTargets) {
  int last = 0;
  for (const ArchitectureInfo& info : Architectures()) {
    EXPECT_GT(info.compute_capability, last);
    last = info.compute_capability;
    EXPECT_EQ(TargetOf(last).rfind("sm_" + std::to_string(last), 0), 0u);
    EXPECT_EQ(&InfoOf(info.architecture), &info);
  }
}

}  // namespace
}  // namespace attnd
