// The program's archives for sm_70, sm_80 and sm_90a: what they hold and which GPUs they serve, and
// the rows of kernels.lock.
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/library/embedded_kernels.h"
#include "kernels/cuda/library/kernel_library.h"
#include "kernels/cuda/library/kernel_sample.h"
#include "kernels/cuda/library/packed_cubin.h"

namespace attnd {
namespace {

using ::testing::IsSupersetOf;
using ::testing::UnorderedElementsAreArray;

constexpr char kFakeDriverFile[] = "tests/fakes/libfake_cuda.so";

std::vector<std::string> SampleOf(int compute_capability) {
  std::vector<std::string> names;
  for (const KernelRow& row : KernelRowsOfGpu(compute_capability)) {
    if (IsSampled(row, compute_capability)) names.push_back(NameOf(row));
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
  EXPECT_EQ(archive.target, TargetOf(architecture));
  for (const ArchivedKernel& kernel : archive.kernels) {
    SCOPED_TRACE(archive.target + " " + kernel.name);
    const absl::StatusOr<Cubin> unpacked = UnpackCubin(kernel.cubin);
    ASSERT_TRUE(unpacked.ok()) << unpacked.status();
    const absl::string_view cubin = unpacked->bytes();
    ASSERT_EQ(cubin.substr(0, 4),
              "\x7f"
              "ELF");
    EXPECT_EQ(ReadAt<uint16_t>(cubin, kMachineOffset), kCuda);
    EXPECT_EQ(ReadAt<uint32_t>(cubin, kFlagsOffset) & 0xff, architecture);
    EXPECT_NE(cubin.find(".text." + kernel.entry), absl::string_view::npos);
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

TEST(TargetArchives, HoldMachineCodeOfTheSampleAtLeast) {
  const std::vector<absl::string_view> archives = EmbeddedKernelArchives();
  ASSERT_EQ(archives.size(), Architectures().size());
  for (size_t n = 0; n < archives.size(); ++n) {
    const int compute_capability = Architectures()[n].compute_capability;
    const KernelArchive archive = Parse(archives[n]);
    EXPECT_THAT(NamesIn(archive), IsSupersetOf(SampleOf(compute_capability)));
    ExpectMachineCode(archive, compute_capability);
  }
}

TEST(TargetArchives, ServeTheirGenerationAlone) {
  auto driver = Driver::Load(kFakeDriverFile);
  ASSERT_TRUE(driver.ok()) << driver.status();
  // A GPU, and the archive that has its kernels or those that it could run if it were older.
  const std::vector<std::pair<int, int>> gpus = {{70, 70}, {75, 70}, {80, 80},  {86, 80},
                                                 {89, 80}, {90, 90}, {100, 80}, {120, 80}};
  for (const auto& [gpu, archive] : gpus) {
    auto library = KernelLibrary::Create(**driver, gpu / 10, gpu % 10, EmbeddedKernelArchives(),
                                         {.compiler = "libabsent.so"});
    ASSERT_TRUE(library.ok()) << library.status();
    for (const KernelRow& row : KernelRowsOfGpu(gpu)) {
      if (!IsSampled(row, archive)) continue;
      EXPECT_EQ((*library)->Check(row).ok(), gpu < 100) << gpu << " " << NameOf(row);
      if (gpu < 100) {
        EXPECT_TRUE((*library)->Get(row).ok()) << gpu << " " << NameOf(row);
      }
    }
  }
}

// lock_test.sh compares registers and spills with the compiler's.
TEST(KernelLock, HasALineOfEachKernelOfEachArchive) {
  std::vector<std::string> locked, rows;
  std::ifstream lock("kernels/cuda/library/kernels.lock");
  for (std::string line; std::getline(lock, line);) {
    std::istringstream words(line);
    std::string target, name;
    words >> target >> name;
    if (target.rfind("sm_", 0) == 0) locked.push_back(absl::StrCat(target, " ", name));
  }
  for (const ArchitectureInfo& info : Architectures()) {
    for (const KernelRow& row : KernelRowsOfGpu(info.compute_capability)) {
      rows.push_back(absl::StrCat(TargetOf(info.compute_capability), " ", NameOf(row)));
    }
  }
  EXPECT_THAT(locked, UnorderedElementsAreArray(rows)) << "run ./dev lock";
}

TEST(KernelSample, HasEachKindAndElementOfEachArchitectureAndNoMoreThanHalf) {
  for (const ArchitectureInfo& info : Architectures()) {
    std::set<std::pair<KernelKind, ElementType>> all, sampled;
    size_t count = 0;
    for (const KernelRow& row : KernelRowsOf(info.architecture)) {
      all.emplace(row.kind, row.element);
      if (!IsSampled(row, info.compute_capability)) continue;
      sampled.emplace(row.kind, row.element);
      ++count;
    }
    EXPECT_EQ(sampled, all) << info.name;
    EXPECT_LE(count, KernelRowsOfGpu(info.compute_capability).size() / 2) << info.name;
  }
}

}  // namespace
}  // namespace attnd
