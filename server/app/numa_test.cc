#include "server/app/numa.h"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace attnd {
namespace {

// A sysfs of a test's own.
class NumaTest : public testing::Test {
 protected:
  NumaTest() : root_(testing::TempDir() + "/sysfs_" + std::to_string(getpid())) {}
  ~NumaTest() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  const std::string root_;
};

TEST_F(NumaTest, FindsTheNodeOfADeviceHoweverItsAddressIsWritten) {
  Write("/bus/pci/devices/0000:3b:00.0/numa_node", "1");
  EXPECT_EQ(NumaNodeOfPciDevice("0000:3b:00.0", root_), 1);
  EXPECT_EQ(NumaNodeOfPciDevice("0000:3B:00.0", root_), 1);
  EXPECT_EQ(NumaNodeOfPciDevice("00000000:3B:00.0", root_), 1);
}

TEST_F(NumaTest, KnowsNoNodeWhereSysfsTellsNone) {
  Write("/bus/pci/devices/0000:3b:00.0/numa_node", "-1");
  EXPECT_EQ(NumaNodeOfPciDevice("0000:3b:00.0", root_), std::nullopt);
  EXPECT_EQ(NumaNodeOfPciDevice("0000:3c:00.0", root_), std::nullopt);
  EXPECT_EQ(NumaNodeOfPciDevice("", root_), std::nullopt);
}

TEST_F(NumaTest, ReadsRangesOfNodes) {
  EXPECT_EQ(NumaNodes(root_), std::vector<int>{0});
  Write("/devices/system/node/has_memory", "0-1,4");
  EXPECT_EQ(NumaNodes(root_), (std::vector<int>{0, 1, 4}));
}

TEST_F(NumaTest, MovesAPolicyToMemoryOfThisMachine) {
  constexpr size_t kBytes = 1 << 16;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const int node = NumaNodes().front();
  const absl::Status status =
      PreferNumaNodes({static_cast<std::byte*>(memory), kBytes}, std::vector<int>{node});
  int policy = -1;
  const long asked = syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, memory, MPOL_F_ADDR);
  if (status.ok() && asked == 0) {
    EXPECT_EQ(policy, MPOL_PREFERRED);
  } else {  // a container that forbids it says so
    EXPECT_FALSE(status.ok()) << "set, but not to be asked for";
  }
  munmap(memory, kBytes);
}

}  // namespace
}  // namespace attnd
