#include "server/shared_memory/shared_region.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "net/file_descriptor.h"

namespace attnd {
namespace {

constexpr int64_t kSize = 4 * 4096;
constexpr int kGoodSeals = F_SEAL_SHRINK | F_SEAL_GROW;

FileDescriptor Memfd(int64_t size, unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING) {
  FileDescriptor fd(memfd_create("test", flags));
  EXPECT_EQ(ftruncate(fd.get(), size), 0) << strerror(errno);
  return fd;
}

FileDescriptor GoodMemfd(int64_t size = kSize) {
  FileDescriptor fd = Memfd(size);
  EXPECT_EQ(fallocate(fd.get(), 0, 0, size), 0);
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, kGoodSeals), 0);
  return fd;
}

std::string ErrorOf(int fd, int64_t size = kSize) {
  auto region = SharedRegion::Map(fd, size);
  return region.ok() ? "" : std::string(region.status().message());
}

TEST(SharedRegion, IsTheSameMemoryAsTheSenders) {
  FileDescriptor fd = GoodMemfd();
  auto* sender =
      static_cast<char*>(mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
  ASSERT_NE(sender, MAP_FAILED);
  auto region = SharedRegion::Map(fd.get(), kSize);
  ASSERT_TRUE(region.ok()) << region.status().message();
  memcpy(sender + 100, "from him", 8);
  EXPECT_EQ(memcmp((*region)->data() + 100, "from him", 8), 0);
  memcpy((*region)->data() + kSize - 8, "from us.", 8);
  EXPECT_EQ(memcmp(sender + kSize - 8, "from us.", 8), 0);
  munmap(sender, kSize);
}

TEST(SharedRegion, CannotLoseAPageOnceItIsMapped) {
  FileDescriptor fd = GoodMemfd();
  void* sender = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(sender, MAP_FAILED);
  auto region = SharedRegion::Map(fd.get(), kSize);
  ASSERT_TRUE(region.ok());
  EXPECT_NE(ftruncate(fd.get(), 0), 0);
  EXPECT_NE(fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
  EXPECT_NE(madvise(sender, 4096, MADV_REMOVE), 0);
  munmap(sender, kSize);
}

TEST(SharedRegion, RefusesWhatIsNoMemfd) {
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  EXPECT_NE(ErrorOf(pipes[0]), "");
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  EXPECT_NE(ErrorOf(sockets[0]), "");
  for (int fd : {pipes[0], pipes[1], sockets[0], sockets[1]}) close(fd);
  std::string name = testing::TempDir() + "/region";
  FileDescriptor file(open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(ftruncate(file.get(), kSize), 0);
  EXPECT_NE(ErrorOf(file.get()), "");
  FileDescriptor folder(open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  EXPECT_NE(ErrorOf(folder.get()), "");
  FileDescriptor zero(open("/dev/zero", O_RDWR | O_CLOEXEC));
  EXPECT_NE(ErrorOf(zero.get()), "");
  EXPECT_NE(ErrorOf(-1), "");
}

TEST(SharedRegion, RefusesATmpfsFile) {
  FileDescriptor file(open("/dev/shm", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  if (!file.valid()) GTEST_SKIP() << "no tmpfs at /dev/shm";
  ASSERT_EQ(ftruncate(file.get(), kSize), 0);
  EXPECT_NE(ErrorOf(file.get()), "");
}

TEST(SharedRegion, RefusesSealsThatAreMissingOrInTheWay) {
  struct Case {
    const char* name;
    int seals;
  };
  for (const Case& c :
       {Case{"none", 0}, Case{"shrink alone", F_SEAL_SHRINK}, Case{"grow alone", F_SEAL_GROW},
        Case{"sealed seals", kGoodSeals | F_SEAL_SEAL},
        Case{"not writable", kGoodSeals | F_SEAL_WRITE}}) {
    SCOPED_TRACE(c.name);
    FileDescriptor fd = Memfd(kSize);
    ASSERT_EQ(fallocate(fd.get(), 0, 0, kSize), 0);
    ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, c.seals), 0);
    EXPECT_NE(ErrorOf(fd.get()), "");
  }
  FileDescriptor unsealable = Memfd(kSize, MFD_CLOEXEC);
  EXPECT_NE(ErrorOf(unsealable.get()), "");
}

TEST(SharedRegion, RefusesADescriptorThatCannotBeWritten) {
  FileDescriptor fd = GoodMemfd();
  std::string path = "/proc/self/fd/" + std::to_string(fd.get());
  FileDescriptor read_only(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(read_only.valid());
  EXPECT_NE(ErrorOf(read_only.get()), "");
}

TEST(SharedRegion, RefusesAnotherSizeThanDeclared) {
  FileDescriptor fd = GoodMemfd();
  EXPECT_EQ(ErrorOf(fd.get(), kSize + 4096), "memfd: expected 20480 bytes, as declared, got 16384");
  EXPECT_NE(ErrorOf(fd.get(), kSize - 4096), "");
  EXPECT_NE(ErrorOf(fd.get(), kSize - 1), "");
  EXPECT_NE(ErrorOf(fd.get(), int64_t{1} << 46), "");
  FileDescriptor odd = GoodMemfd(kSize + 2048);
  EXPECT_NE(ErrorOf(odd.get(), kSize + 2048), "");
}

// The daemon would have to find pages that are not allocated when it first touches them.
TEST(SharedRegion, RefusesPagesThatAreNotAllocated) {
  FileDescriptor fd = Memfd(kSize);
  ASSERT_EQ(fallocate(fd.get(), 0, 0, kSize - 4096), 0);
  ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, kGoodSeals), 0);
  EXPECT_EQ(ErrorOf(fd.get()), "memfd: expected 16384 allocated bytes, got 12288");
}

}  // namespace
}  // namespace attnd
