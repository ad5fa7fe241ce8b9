// StateFolder: the folder of one module's state, reached by its descriptor alone. No link is
// followed, nothing but a regular file of this process's user is opened, and no open waits, as that
// of a FIFO would. A file is made anew each time, so that a link of its name is replaced.
// Errors: UNAVAILABLE STATE_UNAVAILABLE, whose message names the file within the folder of all
// states; the path of that folder is the server's own affair. One thread at a time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "net/file_descriptor.h"

namespace attnd {

// The calls of the system by which states change. Tests put a disk in their place that fails, tears
// writes, and forgets what was not synced. Results are the system's, with errno.
class StateDisk {
 public:
  virtual ~StateDisk() = default;
  virtual int Make(int folder, const char* file);  // a new one, for writing
  virtual ssize_t Write(int file, absl::string_view bytes);
  virtual int Sync(int descriptor);  // of a file or folder
  virtual int Rename(int folder, const char* from, const char* to);
  virtual int Remove(int folder, const char* name, int flags);
  virtual bool IsHostMemory(int folder);  // a tmpfs, which does not outlive the host
};

// A file that is read. Its size is that of the opening: what is cut off later cannot be read.
class StateFile {
 public:
  StateFile(FileDescriptor file, std::string name, int64_t size)
      : file_(std::move(file)), name_(std::move(name)), size_(size) {}
  int64_t size() const { return size_; }
  const std::string& name() const { return name_; }
  absl::Status Read(int64_t offset, absl::Span<std::byte> bytes) const;

 private:
  FileDescriptor file_;
  std::string name_;
  int64_t size_;
};

// A file that is written.
class NewStateFile {
 public:
  NewStateFile(StateDisk& disk, FileDescriptor file, std::string name)
      : disk_(&disk), file_(std::move(file)), name_(std::move(name)) {}
  absl::Status Write(absl::string_view bytes);
  absl::Status Sync();

 private:
  StateDisk* disk_;
  FileDescriptor file_;
  std::string name_;
};

class StateFolder {
 public:
  // Makes the folder `name` of `root` if there is none, and takes its lock. FAILED_PRECONDITION
  // where another process, or another part of this one, has it. `disk` outlives the folder.
  static absl::StatusOr<StateFolder> Open(StateDisk& disk, int root, const std::string& name);
  // The same of a folder that is there; NOT_FOUND.
  static absl::StatusOr<StateFolder> OpenOld(StateDisk& disk, int root, const std::string& name);

  const std::string& name() const { return name_; }
  // NOT_FOUND: there is none. DATA_LOSS: it is no file of this user's, or cannot be read any more.
  absl::StatusOr<StateFile> Read(const std::string& file) const;
  absl::StatusOr<NewStateFile> Create(const std::string& file) const;
  absl::Status Rename(const std::string& from, const std::string& to) const;
  absl::Status Sync() const;
  int64_t Bytes() const;      // of its files
  void Touch() const;         // it is in use now: UsedAt
  absl::Time UsedAt() const;  // or changed
  void Remove() const;        // with the files of a state

 private:
  StateFolder(StateDisk& disk, int root, std::string name, FileDescriptor folder,
              FileDescriptor lock)
      : disk_(&disk),
        root_(root),
        name_(std::move(name)),
        folder_(std::move(folder)),
        lock_(std::move(lock)) {}
  std::string PathOf(const std::string& file) const;

  StateDisk* disk_;
  int root_;
  std::string name_;
  FileDescriptor folder_, lock_;
};

// UNAVAILABLE STATE_UNAVAILABLE; with errno's text.
absl::Status StateUnavailable(absl::string_view message);
absl::Status StateUnavailable(absl::string_view what, absl::string_view name);
// Checks that this process's user owns the folder and others cannot write to it; returns why it is
// not so. Empty: it is.
std::string WhyNotPrivate(int folder);

}  // namespace attnd
