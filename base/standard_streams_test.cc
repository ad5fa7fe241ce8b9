#include "base/standard_streams.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <initializer_list>

namespace attnd {
namespace {

// In a process of its own, since it is about its first descriptors.
[[noreturn]] void OpenAFileAfterClosing(std::initializer_list<int> streams) {
  for (int fd : streams) close(fd);
  OccupyStandardStreams();
  bool apart = open("/dev/null", O_RDWR) > STDERR_FILENO;
  for (int fd : streams) {
    char byte = 0;
    bool works = fd == STDIN_FILENO ? read(fd, &byte, 1) >= 0 : write(fd, &byte, 1) >= 0;
    apart &= !works;
  }
  _exit(apart ? 0 : 1);
}

TEST(StandardStreams, AreNoOtherFilesWhenTheyWereClosed) {
  const testing::ExitedWithCode fine(0);
  EXPECT_EXIT(OpenAFileAfterClosing({2}), fine, "");
  EXPECT_EXIT(OpenAFileAfterClosing({0, 1, 2}), fine, "");
  EXPECT_EXIT(OpenAFileAfterClosing({1}), fine, "");
}

TEST(StandardStreams, StayWhenTheyAreOpen) {
  struct stat before, after;
  ASSERT_EQ(fstat(STDERR_FILENO, &before), 0);
  OccupyStandardStreams();
  ASSERT_EQ(fstat(STDERR_FILENO, &after), 0);
  EXPECT_EQ(after.st_ino, before.st_ino);
}

}  // namespace
}  // namespace attnd
