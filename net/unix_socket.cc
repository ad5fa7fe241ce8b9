#include "net/unix_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "net/listen_address.h"

namespace attnd {
namespace {

struct SocketAddress {
  sockaddr_un un = {};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&un); }
};

absl::Status CannotListen(absl::string_view address, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", why));
}

absl::StatusOr<SocketAddress> Parse(absl::string_view address) {
  SocketAddress out;
  out.un.sun_family = AF_UNIX;
  const std::string path = UnixPath(address);
  absl::string_view name = path;
  size_t begin = 0;
  if (absl::ConsumePrefix(&address, "unix-abstract:")) {
    name = address;
    begin = 1;  // after a 0
  }
  if (begin + name.size() >= sizeof(out.un.sun_path)) {
    return CannotListen(address, "the path is too long");
  }
  std::memcpy(out.un.sun_path + begin, name.data(), name.size());
  out.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + begin + name.size() +
                                    (begin == 0 ? 1 : 0));
  return out;
}

bool IsListenedTo(const SocketAddress& address, int type) {
  FileDescriptor fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return connect(fd.get(), address.get(), address.size) == 0 ||
         errno == EAGAIN;  // its backlog is full
}

ino_t InodeOf(const std::string& path) {
  struct stat file;
  return lstat(path.c_str(), &file) == 0 && S_ISSOCK(file.st_mode) ? file.st_ino : 0;
}

}  // namespace

absl::StatusOr<UnixSocket> UnixSocket::Listen(absl::string_view address, int type, int backlog) {
  absl::StatusOr<SocketAddress> at = Parse(address);
  if (!at.ok()) return at.status();
  const std::string path = UnixPath(address);
  if (IsListenedTo(*at, type)) return CannotListen(address, std::strerror(EADDRINUSE));
  RemoveFile(path);
  FileDescriptor fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid() || bind(fd.get(), at->get(), at->size) != 0 || listen(fd.get(), backlog) != 0) {
    return CannotListen(address, std::strerror(errno));
  }
  return UnixSocket(std::move(fd), path);
}

void UnixSocket::RemoveFile(const std::string& path) {
  if (InodeOf(path) != 0) unlink(path.c_str());
}

UnixSocket::UnixSocket(FileDescriptor socket, std::string path)
    : socket_(std::move(socket)), path_(std::move(path)), inode_(InodeOf(path_)) {}

UnixSocket::~UnixSocket() {
  if (!path_.empty() && inode_ != 0 && InodeOf(path_) == inode_) unlink(path_.c_str());
}

}  // namespace attnd
