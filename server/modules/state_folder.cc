#include "server/modules/state_folder.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr int kNoSurprise = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
constexpr absl::Duration kStateRetryDelay = absl::Seconds(1);
// A folder may go, swept or forgotten, while it is opened.
constexpr int kTriesToOpen = 4;
constexpr const char* kStateFiles[] = {"commit",        "commit.next", "a.safetensors",
                                       "b.safetensors", "caller",      "lock"};

// Tells a file that is wrong, or that the disk cannot give any more, from one that may be right.
absl::Status CannotRead(absl::string_view what, const std::string& name) {
  const bool is_damage = errno == ELOOP || errno == ENXIO || errno == ENODEV || errno == EIO;
  if (!is_damage) return StateUnavailable(what, name);
  return absl::DataLossError(absl::StrCat(name, ": ", std::strerror(errno)));
}

absl::StatusOr<FileDescriptor> OpenFolder(int root, const std::string& name) {
  FileDescriptor folder(openat(root, name.c_str(), O_RDONLY | O_DIRECTORY | kNoSurprise));
  if (!folder.valid()) {
    if (errno == ENOENT) return absl::NotFoundError(name);
    return StateUnavailable("cannot open the folder", name);
  }
  const std::string why = WhyNotPrivate(folder.get());
  if (!why.empty()) return StateUnavailable(absl::StrCat("state ", name, ": ", why));
  return folder;
}

// Whether `lock` is still the folder's file of that name.
bool IsStillLock(int folder, int lock) {
  struct stat by_name {
  }, by_descriptor{};
  return fstatat(folder, "lock", &by_name, AT_SYMLINK_NOFOLLOW) == 0 &&
         fstat(lock, &by_descriptor) == 0 && by_name.st_ino == by_descriptor.st_ino &&
         by_name.st_dev == by_descriptor.st_dev;
}

// DATA_LOSS: it is none of this user's files.
absl::Status CheckStateFile(int file, const std::string& name, int64_t* size) {
  struct stat of {};
  if (fstat(file, &of) != 0) return StateUnavailable("cannot look at", name);
  if (!S_ISREG(of.st_mode)) return absl::DataLossError(absl::StrCat(name, ": not a file"));
  if (of.st_uid != geteuid()) return absl::DataLossError(absl::StrCat(name, ": another user's"));
  *size = of.st_size;
  return absl::OkStatus();
}

// NOT_FOUND: the folder has gone meanwhile.
absl::StatusOr<FileDescriptor> LockFolder(int folder, const std::string& name) {
  FileDescriptor lock(openat(folder, "lock", O_RDWR | O_CREAT | kNoSurprise, 0600));
  if (!lock.valid()) {
    if (errno == ENOENT) return absl::NotFoundError(name);
    return StateUnavailable("cannot open the lock of", name);
  }
  int64_t size = 0;
  const absl::Status is_file = CheckStateFile(lock.get(), absl::StrCat(name, "/lock"), &size);
  if (!is_file.ok()) return StateUnavailable(absl::StrCat("state ", is_file.message()));
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("state ", name, ": another attnd of this host uses it"));
  }
  if (!IsStillLock(folder, lock.get())) return absl::NotFoundError(name);
  return lock;
}

}  // namespace

absl::Status StateUnavailable(absl::string_view message) {
  return WithRetryAfter(Failure(absl::StatusCode::kUnavailable, reason::kStateUnavailable, message),
                        kStateRetryDelay);
}

absl::Status StateUnavailable(absl::string_view what, absl::string_view name) {
  const char* why = std::strerror(errno);
  return StateUnavailable(absl::StrCat("state: ", what, " ", name, ": ", why));
}

std::string WhyNotPrivate(int folder) {
  struct stat of {};
  if (fstat(folder, &of) != 0) return std::strerror(errno);
  if (of.st_uid != geteuid()) return "another user's folder";
  if ((of.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "a folder that other users may write to";
  return "";
}

int StateDisk::Make(int folder, const char* file) {
  return openat(folder, file, O_WRONLY | O_CREAT | O_EXCL | kNoSurprise, 0600);
}

ssize_t StateDisk::Write(int file, absl::string_view bytes) {
  return write(file, bytes.data(), bytes.size());
}

int StateDisk::Sync(int descriptor) { return fsync(descriptor); }

int StateDisk::Rename(int folder, const char* from, const char* to) {
  return renameat(folder, from, folder, to);
}

int StateDisk::Remove(int folder, const char* name, int flags) {
  return unlinkat(folder, name, flags);
}

bool StateDisk::IsHostMemory(int folder) {
  struct statfs of {};
  return fstatfs(folder, &of) == 0 && (of.f_type == TMPFS_MAGIC || of.f_type == RAMFS_MAGIC);
}

absl::Status StateFile::Read(int64_t offset, absl::Span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t got = pread(file_.get(), bytes.data(), bytes.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return CannotRead("cannot read", name_);
    if (got == 0) return absl::DataLossError(absl::StrCat(name_, ": it is cut off"));
    bytes.remove_prefix(static_cast<size_t>(got));
    offset += got;
  }
  return absl::OkStatus();
}

absl::Status NewStateFile::Write(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = disk_->Write(file_.get(), bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return StateUnavailable("cannot write", name_);
    bytes.remove_prefix(static_cast<size_t>(put));
  }
  return absl::OkStatus();
}

absl::Status NewStateFile::Sync() {
  return disk_->Sync(file_.get()) == 0 ? absl::OkStatus() : StateUnavailable("cannot sync", name_);
}

absl::StatusOr<StateFolder> StateFolder::OpenOld(StateDisk& disk, int root,
                                                 const std::string& name) {
  ASSIGN_OR_RETURN(FileDescriptor folder, OpenFolder(root, name));
  ASSIGN_OR_RETURN(FileDescriptor lock, LockFolder(folder.get(), name));
  return StateFolder(disk, root, name, std::move(folder), std::move(lock));
}

absl::StatusOr<StateFolder> StateFolder::Open(StateDisk& disk, int root, const std::string& name) {
  for (int n = 0; n < kTriesToOpen; ++n) {
    if (mkdirat(root, name.c_str(), 0700) != 0 && errno != EEXIST) {
      return StateUnavailable("cannot make the folder", name);
    }
    absl::StatusOr<StateFolder> folder = OpenOld(disk, root, name);
    if (!absl::IsNotFound(folder.status())) return folder;
  }
  return StateUnavailable(absl::StrCat("state ", name, ": its folder goes again and again"));
}

std::string StateFolder::PathOf(const std::string& file) const {
  return absl::StrCat(name_, "/", file);
}

absl::StatusOr<StateFile> StateFolder::Read(const std::string& file) const {
  FileDescriptor descriptor(openat(folder_.get(), file.c_str(), O_RDONLY | kNoSurprise));
  if (!descriptor.valid()) {
    if (errno == ENOENT) return absl::NotFoundError(absl::StrCat(PathOf(file), ": it is missing"));
    return CannotRead("cannot open", PathOf(file));
  }
  int64_t size = 0;
  RETURN_IF_ERROR(CheckStateFile(descriptor.get(), PathOf(file), &size));
  return StateFile(std::move(descriptor), PathOf(file), size);
}

absl::StatusOr<NewStateFile> StateFolder::Create(const std::string& file) const {
  if (disk_->Remove(folder_.get(), file.c_str(), 0) != 0 && errno != ENOENT) {
    return StateUnavailable("cannot replace", PathOf(file));
  }
  FileDescriptor descriptor(disk_->Make(folder_.get(), file.c_str()));
  if (!descriptor.valid()) return StateUnavailable("cannot make", PathOf(file));
  return NewStateFile(*disk_, std::move(descriptor), PathOf(file));
}

absl::Status StateFolder::Rename(const std::string& from, const std::string& to) const {
  if (disk_->Rename(folder_.get(), from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return StateUnavailable("cannot rename", PathOf(from));
}

absl::Status StateFolder::Sync() const {
  return disk_->Sync(folder_.get()) == 0 ? absl::OkStatus()
                                         : StateUnavailable("cannot sync", name_);
}

int64_t StateFolder::Bytes() const {
  int64_t bytes = 0;
  for (const char* file : kStateFiles) {
    struct stat of {};
    if (fstatat(folder_.get(), file, &of, AT_SYMLINK_NOFOLLOW) == 0) bytes += of.st_size;
  }
  return bytes;
}

void StateFolder::Touch() const { futimens(folder_.get(), nullptr); }

absl::Time StateFolder::UsedAt() const {
  struct stat of {};
  return fstat(folder_.get(), &of) == 0 ? absl::TimeFromTimespec(of.st_mtim)
                                        : absl::InfiniteFuture();
}

void StateFolder::Remove() const {
  for (const char* file : kStateFiles) disk_->Remove(folder_.get(), file, 0);
  disk_->Remove(root_, name_.c_str(), AT_REMOVEDIR);
}

}  // namespace attnd
