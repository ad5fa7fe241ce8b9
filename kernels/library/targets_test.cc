// What the build compiles for each target: the program's archives for sm_70 and sm_90, and one for
// sm_80 that only this test has.
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "base/read_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/library/embedded_kernels.h"
#include "kernels/library/kernel_library.h"

namespace attnd {
namespace {

using ::testing::ElementsAreArray;

constexpr char kFakeDriver[] = "kernels/driver/libfake_cuda.so";
constexpr char kSm80Archive[] = "kernels/library/kernels_sm_80.cubins";
constexpr char kSm80Rows[] = "_d64";  // BUILD's choice

std::vector<std::string> NamesOfRows(const std::string& part) {
  std::vector<std::string> names;
  for (const KernelRow& row : KernelRowsOf(Architecture::kSm70)) {
    if (row.shipped && NameOf(row).find(part) != std::string::npos) names.push_back(NameOf(row));
  }
  return names;
}
std::vector<std::string> NamesIn(const KernelArchive& archive) {
  std::vector<std::string> names;
  for (const ArchivedKernel& kernel : archive.kernels) names.push_back(kernel.name);
  return names;
}

// The ELF header says what a cubin is for: e_machine 190 is CUDA, the low byte of e_flags the
// architecture (as `readelf -h` and nvdisasm read it).
template <class T>
T ReadAt(absl::string_view bytes, size_t offset) {
  T value = 0;
  if (offset + sizeof(T) <= bytes.size()) std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}
constexpr size_t kMachineOffset = 18, kFlagsOffset = 48;
constexpr int kCuda = 190;

void ExpectMachineCode(const KernelArchive& archive, int architecture) {
  EXPECT_EQ(archive.target, "sm_" + std::to_string(architecture));
  for (const ArchivedKernel& kernel : archive.kernels) {
    SCOPED_TRACE(archive.target + " " + kernel.name);
    ASSERT_EQ(kernel.cubin.substr(0, 4),
              "\x7f"
              "ELF");
    EXPECT_EQ(ReadAt<uint16_t>(kernel.cubin, kMachineOffset), kCuda);
    EXPECT_EQ(ReadAt<uint32_t>(kernel.cubin, kFlagsOffset) & 0xff, architecture);
    EXPECT_NE(kernel.cubin.find(".text." + kernel.entry), absl::string_view::npos);
    EXPECT_GT(kernel.threads, 0);
    EXPECT_GT(kernel.registers, 0);
    EXPECT_LE(kernel.registers * kernel.threads, 1 << 16) << "registers of an SM";
  }
}

KernelArchive Parse(absl::string_view bytes) {
  auto archive = ParseKernelArchive(bytes);
  EXPECT_TRUE(archive.ok()) << archive.status();
  return archive.ok() ? *std::move(archive) : KernelArchive{};
}

TEST(TargetArchives, HoldEveryShippedRowOfVoltaAndHopper) {
  const std::vector<absl::string_view> archives = EmbeddedKernelArchives();
  ASSERT_EQ(archives.size(), 2u);
  for (size_t n = 0; n < archives.size(); ++n) {
    const KernelArchive archive = Parse(archives[n]);
    EXPECT_THAT(NamesIn(archive), ElementsAreArray(NamesOfRows("")));
    ExpectMachineCode(archive, n == 0 ? 70 : 90);
  }
}

TEST(TargetArchives, HoldOneHeadDimOfAmpere) {
  const std::string bytes = ReadFile(kSm80Archive);
  const KernelArchive archive = Parse(bytes);
  EXPECT_THAT(NamesIn(archive), ElementsAreArray(NamesOfRows(kSm80Rows)));
  ExpectMachineCode(archive, 80);
  for (const ArchivedKernel& k : archive.kernels) {
    std::cout << archive.target << " " << k.name << ": " << k.registers << " registers, "
              << k.shared_bytes << " shared bytes, " << k.spill_bytes << " spilled\n";
  }
}

TEST(TargetArchives, ServeTheirGenerationAlone) {
  auto driver = Driver::Load(kFakeDriver);
  ASSERT_TRUE(driver.ok()) << driver.status();
  const std::string ampere = ReadFile(kSm80Archive);
  std::vector<absl::string_view> archives = EmbeddedKernelArchives();
  archives.push_back(ampere);
  for (const auto& [major, minor] : {std::pair(8, 0), std::pair(8, 6), std::pair(8, 9)}) {
    auto library =
        KernelLibrary::Create(**driver, major, minor, archives, {.compiler = "libabsent.so"});
    ASSERT_TRUE(library.ok()) << library.status();
    for (const KernelRow& row : KernelRowsOf(Architecture::kSm70)) {
      const bool is_there = NameOf(row).find(kSm80Rows) != std::string::npos;
      EXPECT_EQ((*library)->Check(row).ok(), is_there) << NameOf(row);
      if (is_there) {
        EXPECT_TRUE((*library)->Get(row).ok()) << NameOf(row);
      }
    }
  }
}

}  // namespace
}  // namespace attnd
