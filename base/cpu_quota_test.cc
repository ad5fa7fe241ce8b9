#include "base/cpu_quota.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

namespace attnd {
namespace {

class CpuQuotaTest : public testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  std::string root_ = testing::TempDir() + "/cgroup_" +
                      testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(CpuQuotaTest, TakesTheSmallestQuotaAlongTheV2Path) {
  Write("/pod/cpu.max", "150000 100000\n");
  Write("/pod/app/cpu.max", "max 100000\n");
  EXPECT_DOUBLE_EQ(CgroupCpuQuota(root_, "0::/pod/app\n"), 1.5);
}

TEST_F(CpuQuotaTest, ReadsVersion1) {
  Write("/cpu/box/cpu.cfs_quota_us", "300000\n");
  Write("/cpu/box/cpu.cfs_period_us", "100000\n");
  EXPECT_DOUBLE_EQ(CgroupCpuQuota(root_, "4:cpu,cpuacct:/box\n5:memory:/box\n"), 3.0);
}

TEST_F(CpuQuotaTest, IsZeroWhenNoneIsSet) {
  Write("/cpu/box/cpu.cfs_quota_us", "-1\n");
  Write("/cpu/box/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(CgroupCpuQuota(root_, "4:cpu:/box\n"), 0);
  EXPECT_EQ(CgroupCpuQuota(root_, "0::/nothing/here\n"), 0);
}

TEST(AvailableCpus, IsAtLeastOne) { EXPECT_GE(AvailableCpus(), 1); }

}  // namespace
}  // namespace attnd
