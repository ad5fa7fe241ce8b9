// UnixSocket: a listening unix socket and its file, which goes with it. Move-only; any thread, one
// at a time.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "net/file_descriptor.h"

namespace attnd {

class UnixSocket {
 public:
  // `address`: "unix:PATH" or "unix-abstract:NAME"; `type`: SOCK_STREAM or SOCK_SEQPACKET. The
  // umask decides who may connect. A socket that no process listens on is replaced. UNAVAILABLE
  // naming the address when one does, or the path cannot be had.
  static absl::StatusOr<UnixSocket> Listen(absl::string_view address, int type, int backlog);
  UnixSocket(UnixSocket&& other) noexcept
      : socket_(std::move(other.socket_)),
        path_(std::exchange(other.path_, "")),
        inode_(other.inode_) {}
  UnixSocket& operator=(UnixSocket&&) = delete;
  ~UnixSocket();

  // Removes the file of a socket whose place is to be taken, listened on or not; other files stay.
  static void RemoveFile(const std::string& path);

  int get() const { return socket_.get(); }
  FileDescriptor TakeSocket() { return std::move(socket_); }

 private:
  UnixSocket(FileDescriptor socket, std::string path);

  FileDescriptor socket_;
  std::string path_;  // empty: no file
  ino_t inode_ = 0;   // of the file: another process's is not removed
};

}  // namespace attnd
