// The archive's format, the disk cache, and which kernels a GPU gets, against a stand-in driver and
// the real compiler.
#include "kernels/cuda/library/kernel_library.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/library/embedded_kernels.h"
#include "kernels/cuda/library/kernel_sample.h"
#include "kernels/cuda/library/kernel_source.h"
#include "kernels/cuda/library/packed_cubin.h"

namespace attnd {
namespace {

using ::testing::HasSubstr;

constexpr char kFakeDriver[] = "tests/fakes/libfake_cuda.so";

std::string FreshFolder(const std::string& name) {
  std::string folder = std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
  std::filesystem::remove_all(folder);
  return folder;
}

std::string CompilerPath() {
  for (const char* candidate : {"external/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
                                "../nvidia/cuda_nvrtc/lib/libnvrtc.so.12"}) {
    if (std::filesystem::exists(candidate)) return std::filesystem::absolute(candidate);
  }
  return "";
}

KernelArchive TwoKernels() {
  KernelArchive archive;
  archive.target = "sm_70";
  archive.kernels.push_back({"a", "_Za", "first cubin", 256, 40000, 128, 0});
  archive.kernels.push_back({"b", "_Zb", absl::string_view("\n\0end\n", 6), 128, 0, 64, 16});
  return archive;
}

TEST(KernelArchive, ReadsWhatItWrites) {
  std::string bytes = FormatKernelArchive(TwoKernels());
  auto archive = ParseKernelArchive(bytes);
  ASSERT_TRUE(archive.ok()) << archive.status();
  EXPECT_EQ(archive->target, "sm_70");
  ASSERT_EQ(archive->kernels.size(), 2u);
  EXPECT_EQ(archive->Find("a")->cubin, "first cubin");
  EXPECT_EQ(archive->Find("a")->shared_bytes, 40000);
  EXPECT_EQ(archive->Find("b")->cubin.size(), 6u);
  EXPECT_EQ(archive->Find("b")->spill_bytes, 16);
  EXPECT_EQ(archive->Find("c"), nullptr);
}

TEST(KernelArchive, RefusesEveryTruncationAndForeignFiles) {
  std::string bytes = FormatKernelArchive(TwoKernels());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(ParseKernelArchive(absl::string_view(bytes).substr(0, length)).ok()) << length;
  }
  EXPECT_FALSE(ParseKernelArchive("#!/bin/sh\n").ok());
  EXPECT_FALSE(ParseKernelArchive("attnd kernels 1 sm_70\na e 0 -1 1 1 1 1\nend\n").ok());
  EXPECT_FALSE(
      ParseKernelArchive("attnd kernels 1 sm_70\na e 9223372036854775807 9 1 1 1 1\nend\nxx").ok());
}

TEST(PackedCubin, IsSmallerAndComesBackWhole) {
  for (const size_t size : {1, 7, 8, 9, 60000}) {
    std::string cubin(size, 'c');
    for (size_t n = 0; n < size; n += 3) cubin[n] = static_cast<char>(n / 100);
    const std::string packed = PackCubin(cubin);
    const auto unpacked = UnpackCubin(packed);
    ASSERT_TRUE(unpacked.ok()) << unpacked.status();
    EXPECT_EQ(unpacked->bytes(), cubin);
    if (size > 1000) {
      EXPECT_LT(packed.size(), size / 2);
    }
  }
}

TEST(PackedCubin, RefusesEveryTruncationChangeAndAppendix) {
  const std::string cubin = "machine code, machine code, machine code";
  const std::string packed = PackCubin(cubin);
  for (size_t length = 0; length < packed.size(); ++length) {
    EXPECT_TRUE(absl::IsDataLoss(UnpackCubin(packed.substr(0, length)).status())) << length;
    std::string changed = packed;
    changed[length] ^= 0x40;
    const auto unpacked = UnpackCubin(changed);  // the stream's last bits may mean nothing
    EXPECT_TRUE(!unpacked.ok() || unpacked->bytes() == cubin) << length;
  }
  EXPECT_FALSE(UnpackCubin(packed + "x").ok());
  EXPECT_FALSE(UnpackCubin("\x7f"
                           "ELF, a cubin that is not packed")
                   .ok());
}

TEST(KernelCache, KeepsFilesWholeAndPerKey) {
  KernelCache cache(FreshFolder("cache"));
  EXPECT_EQ(cache.Get("key"), std::nullopt);
  ASSERT_TRUE(cache.Put("key", "bytes").ok());
  ASSERT_TRUE(cache.Put("key", "other bytes").ok());
  EXPECT_EQ(cache.Get("key"), "other bytes");
  EXPECT_EQ(cache.Get("another"), std::nullopt);
  int files = 0;
  for (auto& entry : std::filesystem::directory_iterator(cache.directory())) {
    ++files;
    EXPECT_EQ(entry.path().extension(), ".cubins");
  }
  EXPECT_EQ(files, 1);
}

// Writers of one key in several processes: every reader sees one writer's bytes whole.
TEST(KernelCache, ServesSeveralProcesses) {
  KernelCache cache(FreshFolder("shared"));
  std::vector<pid_t> writers;
  for (char letter : {'a', 'b', 'c'}) {
    pid_t writer = fork();
    if (writer == 0) {
      for (int i = 0; i < 30; ++i) {
        if (!cache.Put("key", std::string(100000, letter)).ok()) _exit(1);
      }
      _exit(0);
    }
    writers.push_back(writer);
  }
  for (int i = 0; i < 300; ++i) {
    std::optional<std::string> bytes = cache.Get("key");
    if (!bytes.has_value()) continue;
    ASSERT_EQ(*bytes, std::string(100000, (*bytes)[0]));
  }
  for (pid_t writer : writers) {
    int state = 0;
    waitpid(writer, &state, 0);
    EXPECT_EQ(state, 0);
  }
}

TEST(KernelCache, SaysWhyItCannotWrite) {
  std::string folder = FreshFolder("file");
  std::ofstream(folder) << "not a folder";
  absl::Status status = KernelCache(folder).Put("key", "bytes");
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(KernelCache(folder).Get("key"), std::nullopt);
}

TEST(HashText, IsFnv1aOf128Bits) {
  EXPECT_EQ(HashText(""), "6c62272e07bb014262b821756295c58d");
  EXPECT_EQ(HashText("a"), "d228cb696f1a8caf78912b704e4a8964");
}

TEST(KernelSource, IsInTheFolderAndNamespaceOfTheRowsArchitecture) {
  for (const KernelRow& row : KernelRows()) {
    const std::string name = InfoOf(row.architecture).name;
    const KernelSource source = SourceOf(row, "sm_80");
    EXPECT_EQ(source.space, "attnd::" + name);
    EXPECT_THAT(source.text, HasSubstr("#include \"kernels/" + name + "/entry.cuh\""));
    EXPECT_THAT(source.text, HasSubstr("namespace " + source.space + " {"));
    EXPECT_THAT(source.expression, HasSubstr(source.space + "::Chosen"));
    const std::string newer = SourceOf(row, "sm_90a").expression;
    EXPECT_EQ(newer != source.expression, row.architecture == Architecture::kSm80) << newer;
  }
}

class KernelLibraryTest : public ::testing::Test {
 protected:
  KernelLibraryTest() {
    auto driver = Driver::Load(kFakeDriver);
    EXPECT_TRUE(driver.ok()) << driver.status();
    driver_ = *std::move(driver);
  }
  std::unique_ptr<KernelLibrary> Create(int major, int minor,
                                        std::vector<absl::string_view> archives,
                                        const KernelLibrary::Options& options) {
    auto library = KernelLibrary::Create(*driver_, major, minor, archives, options);
    EXPECT_TRUE(library.ok()) << library.status();
    return *std::move(library);
  }
  std::unique_ptr<Driver> driver_;
  // A row that every build for tests has.
  const KernelRow row_ = *std::find_if(KernelRows().begin(), KernelRows().end(),
                                       [](const KernelRow& row) { return IsSampled(row, 70); });
};

TEST_F(KernelLibraryTest, LoadsWhatTheProgramHoldsForTheGpu) {
  auto library = Create(7, 0, EmbeddedKernelArchives(), {.compiler = "libabsent.so"});
  for (const KernelRow& row : KernelRowsOf(Architecture::kSm70)) {
    if (!IsSampled(row, 70)) continue;
    EXPECT_TRUE(library->Check(row).ok()) << library->Check(row);
    auto kernel = library->Get(row);
    ASSERT_TRUE(kernel.ok()) << kernel.status();
    EXPECT_GT(kernel->threads, 0);
    EXPECT_LE(kernel->shared_bytes, 96 << 10);
  }
  EXPECT_EQ(library->compiled(), 0);
}

TEST_F(KernelLibraryTest, RefusesWhatIsNeitherInTheProgramNorCompilable) {
  auto library = Create(7, 0, {}, {.compiler = "libabsent.so"});
  absl::Status status = library->Check(row_);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is not part of this build for sm_70"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("libabsent.so"));
  EXPECT_EQ(library->Get(row_).status().code(), absl::StatusCode::kUnimplemented);
}

// A build may hold some of a GPU's kernels, or none (cubins.bzl).
TEST_F(KernelLibraryTest, CompilesWhatTheArchiveLacksIfACompilerIsThere) {
  ASSERT_NE(CompilerPath(), "");
  KernelRow absent = row_;
  absent.dropout = true;
  auto whole = ParseKernelArchive(EmbeddedKernelArchives().at(0));
  ASSERT_TRUE(whole.ok()) << whole.status();
  KernelArchive part;
  part.target = whole->target;
  part.kernels = {*whole->Find(NameOf(row_))};
  const std::string bytes = FormatKernelArchive(part);

  auto without = Create(7, 0, {bytes}, {.compiler = "libabsent.so"});
  EXPECT_TRUE(without->Get(row_).ok());
  EXPECT_THAT(std::string(without->Get(absent).status().message()),
              HasSubstr("is not part of this build for sm_70"));
  auto with =
      Create(7, 0, {bytes}, {.cache_directory = FreshFolder("part"), .compiler = CompilerPath()});
  EXPECT_TRUE(with->Get(row_).ok());
  EXPECT_EQ(with->compiled(), 0);
  EXPECT_TRUE(with->Get(absent).ok());
  EXPECT_EQ(with->compiled(), 1);
}

TEST_F(KernelLibraryTest, RunsAnEarlierArchitectureOfTheGenerationOnly) {
  const KernelLibrary::Options no_compiler = {.compiler = "libabsent.so"};
  EXPECT_TRUE(Create(7, 2, EmbeddedKernelArchives(), no_compiler)->Check(row_).ok());
  EXPECT_FALSE(Create(6, 1, EmbeddedKernelArchives(), no_compiler)->Check(row_).ok());
  EXPECT_FALSE(Create(10, 0, EmbeddedKernelArchives(), no_compiler)->Check(row_).ok());
}

TEST_F(KernelLibraryTest, CompilesOnceAndFindsItInTheCacheLater) {
  ASSERT_NE(CompilerPath(), "");
  const KernelLibrary::Options options = {.cache_directory = FreshFolder("compiled"),
                                          .compiler = CompilerPath()};
  auto first = Create(8, 0, {}, options);
  ASSERT_TRUE(first->Check(row_).ok()) << first->Check(row_);
  auto kernel = first->Get(row_);
  ASSERT_TRUE(kernel.ok()) << kernel.status();
  EXPECT_EQ(kernel->threads, 256);
  EXPECT_EQ(first->compiled(), 1);
  ASSERT_TRUE(first->Get(row_).ok());
  EXPECT_EQ(first->compiled(), 1);
  auto second = Create(8, 0, {}, options);
  ASSERT_TRUE(second->Get(row_).ok());
  EXPECT_EQ(second->compiled(), 0);

  // A damaged file is compiled anew; another architecture is another file.
  for (auto& entry : std::filesystem::directory_iterator(options.cache_directory)) {
    std::ofstream(entry.path()) << "damaged";
  }
  auto third = Create(8, 0, {}, options);
  ASSERT_TRUE(third->Get(row_).ok());
  EXPECT_EQ(third->compiled(), 1);
  for (auto& entry : std::filesystem::directory_iterator(options.cache_directory)) {
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end).put('x');  // the last byte of the cubin's checksum
  }
  auto fourth = Create(8, 0, {}, options);
  ASSERT_TRUE(fourth->Get(row_).ok());
  EXPECT_EQ(fourth->compiled(), 1);
  auto other = Create(8, 6, {}, options);
  ASSERT_TRUE(other->Get(row_).ok());
  EXPECT_EQ(other->compiled(), 1);
}

TEST_F(KernelLibraryTest, SaysWhatDoesNotFitIntoSharedMemory) {
  auto library = Create(8, 6, EmbeddedKernelArchives(),
                        {.compiler = "libabsent.so", .shared_bytes_per_block = 99 << 10});
  std::set<std::string> too_large;
  for (const KernelRow& row : KernelRowsOfGpu(86)) {
    if (!IsSampled(row, 80)) continue;
    const absl::Status status = library->Check(row);
    EXPECT_EQ(library->Get(row).ok(), status.ok()) << NameOf(row);
    if (status.ok()) continue;
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(status.message()), HasSubstr("this GPU has 101376"));
    too_large.insert(
        absl::StrCat(row.kind == KernelKind::kBackward ? "backward " : NameOf(row), row.head_dim));
  }
  EXPECT_THAT(too_large, testing::ElementsAre("backward 128", "backward 256"));
}

TEST_F(KernelLibraryTest, CompilesEveryKindOfKernel) {
  ASSERT_NE(CompilerPath(), "");
  auto library =
      Create(8, 6, {}, {.cache_directory = FreshFolder("ampere"), .compiler = CompilerPath()});
  std::set<KernelKind> kinds;
  for (const KernelRow& row : KernelRowsOfGpu(86)) {
    if (!kinds.insert(row.kind).second) continue;
    auto kernel = library->Get(row);
    EXPECT_TRUE(kernel.ok()) << NameOf(row) << ": " << kernel.status();
  }
  EXPECT_GE(kinds.size(), 6u);
  EXPECT_EQ(library->compiled(), static_cast<int>(kinds.size()));
}

}  // namespace
}  // namespace attnd
