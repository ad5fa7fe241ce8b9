#include "net/unix_socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

std::string Path() { return absl::StrCat("/tmp/attnd_socket_", getpid()); }

bool Exists(const std::string& path) {
  struct stat file;
  return lstat(path.c_str(), &file) == 0;
}

// A socket's file that no process listens on.
void LeaveOver(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  FileDescriptor fd(socket(AF_UNIX, SOCK_STREAM, 0));
  ASSERT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
}

absl::StatusOr<UnixSocket> Listen(const std::string& address) {
  return UnixSocket::Listen(address, SOCK_STREAM, 8);
}

TEST(UnixSocket, RemovesItsFileAtTheEnd) {
  {
    auto socket = Listen(absl::StrCat("unix:", Path()));
    ASSERT_TRUE(socket.ok()) << socket.status();
    EXPECT_TRUE(Exists(Path()));
  }
  EXPECT_FALSE(Exists(Path()));
}

TEST(UnixSocket, ReplacesASocketThatNoProcessListensOn) {
  LeaveOver(Path());
  EXPECT_TRUE(Listen(absl::StrCat("unix://", Path())).ok());
}

TEST(UnixSocket, LeavesASocketInUseAlone) {
  const std::string address = absl::StrCat("unix:", Path());
  auto first = Listen(address);
  ASSERT_TRUE(first.ok());
  const absl::Status status = Listen(address).status();
  EXPECT_EQ(status, absl::UnavailableError(
                        absl::StrCat("cannot listen on ", address, ": Address already in use")));
  EXPECT_TRUE(Exists(Path()));
}

TEST(UnixSocket, LeavesTheFileOfAnother) {
  {
    auto socket = Listen(absl::StrCat("unix:", Path()));
    ASSERT_TRUE(socket.ok());
    unlink(Path().c_str());
    LeaveOver(Path());
  }
  EXPECT_TRUE(Exists(Path()));
  unlink(Path().c_str());
}

TEST(UnixSocket, LeavesAFileThatIsNoSocketAlone) {
  FILE* file = fopen(Path().c_str(), "w");
  ASSERT_NE(file, nullptr);
  fclose(file);
  EXPECT_FALSE(Listen(absl::StrCat("unix:", Path())).ok());
  EXPECT_TRUE(Exists(Path()));
  unlink(Path().c_str());
}

TEST(UnixSocket, TakesAnAbstractNameAndRefusesALongPath) {
  const std::string name = absl::StrCat("unix-abstract:attnd-test-", getpid());
  auto first = Listen(name);
  EXPECT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(Listen(name).ok());
  EXPECT_FALSE(Listen(absl::StrCat("unix:/", std::string(200, 'a'))).ok());
}

}  // namespace
}  // namespace attnd
