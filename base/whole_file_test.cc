#include "base/whole_file.h"

#include <filesystem>

#include "gtest/gtest.h"

namespace attnd {
namespace {

TEST(WholeFile, ReadsWhatWasWritten) {
  const std::string path = testing::TempDir() + "/whole_file";
  const std::string bytes = std::string(200'000, 'x') + std::string(1, '\0') + "y\n";
  ASSERT_TRUE(WriteWholeFile(path, bytes).ok());
  EXPECT_EQ(*ReadWholeFile(path), bytes);
  ASSERT_TRUE(WriteWholeFile(path, "").ok());
  EXPECT_EQ(*ReadWholeFile(path), "");
  std::filesystem::remove(path);
}

TEST(WholeFile, SaysWhyItCannot) {
  EXPECT_EQ(ReadWholeFile("/no/such", "--in").status().message(),
            "--in: cannot read /no/such: No such file or directory");
  EXPECT_EQ(ReadWholeFile("/tmp").status().message(), "cannot read /tmp: Is a directory");
  EXPECT_EQ(WriteWholeFile("/no/such", "x", "--out").message(),
            "--out: cannot write /no/such: No such file or directory");
  EXPECT_EQ(WriteWholeFile("/dev/full", "x").message(),
            "cannot write /dev/full: No space left on device");
}

}  // namespace
}  // namespace attnd
