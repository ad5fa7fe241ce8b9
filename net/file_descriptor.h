// FileDescriptor: owns a POSIX descriptor and closes it. Move-only; any thread, one at a time.
#pragma once

#include <unistd.h>

#include <utility>

namespace attnd {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }  // for another owner, or nobody

 private:
  int fd_ = -1;
};

}  // namespace attnd
