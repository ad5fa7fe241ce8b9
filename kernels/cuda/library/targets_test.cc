// What the build compiles for each target: the program's archives for sm_70, sm_80 and sm_90a.
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/library/embedded_kernels.h"
#include "kernels/cuda/library/kernel_library.h"
#include "kernels/cuda/library/packed_cubin.h"

namespace attnd {
namespace {

using ::testing::ElementsAreArray;

constexpr char kFakeDriverFile[] = "kernels/cuda/driver/libfake_cuda.so";

std::vector<std::string> ShippedFor(int compute_capability) {
  std::vector<std::string> names;
  for (const KernelRow& row : KernelRowsOfGpu(compute_capability)) {
    if (row.shipped) names.push_back(NameOf(row));
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

TEST(TargetArchives, HoldEveryShippedRow) {
  const std::vector<absl::string_view> archives = EmbeddedKernelArchives();
  ASSERT_EQ(archives.size(), Architectures().size());
  for (size_t n = 0; n < archives.size(); ++n) {
    const int compute_capability = Architectures()[n].compute_capability;
    const KernelArchive archive = Parse(archives[n]);
    EXPECT_THAT(NamesIn(archive), ElementsAreArray(ShippedFor(compute_capability)));
    ExpectMachineCode(archive, compute_capability);
  }
}

TEST(TargetArchives, ServeTheirGenerationAlone) {
  auto driver = Driver::Load(kFakeDriverFile);
  ASSERT_TRUE(driver.ok()) << driver.status();
  for (const int gpu : {70, 75, 80, 86, 89, 90, 100, 120}) {
    auto library = KernelLibrary::Create(**driver, gpu / 10, gpu % 10, EmbeddedKernelArchives(),
                                         {.compiler = "libabsent.so"});
    ASSERT_TRUE(library.ok()) << library.status();
    for (const KernelRow& row : KernelRowsOfGpu(gpu)) {
      if (!row.shipped) continue;
      EXPECT_EQ((*library)->Check(row).ok(), gpu < 100) << gpu << " " << NameOf(row);
      if (gpu < 100) {
        EXPECT_TRUE((*library)->Get(row).ok()) << gpu << " " << NameOf(row);
      }
    }
  }
}

}  // namespace
}  // namespace attnd
