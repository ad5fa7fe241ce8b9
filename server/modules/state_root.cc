#include "server/modules/state_root.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/modules/running_digest.h"

namespace attnd {
namespace {

constexpr size_t kFolderNameChars = 32;
constexpr int64_t kOwnerBytes = 32;  // of the file `caller`

std::string HexDigest(const std::string& text) {
  return absl::BytesToHexString(DigestOf(text)).substr(0, kFolderNameChars);
}

bool IsFolderName(absl::string_view name) {
  return name.size() == kFolderNameChars &&
         std::all_of(name.begin(), name.end(), [](char c) { return absl::ascii_isxdigit(c); });
}

absl::Status WrongRoot(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("--module_state_dir: expected a folder of this user, which no other may write "
                   "to (mode 0700), got ",
                   path, ": ", why));
}

// Whether a volume is mounted there: a folder in it may be made, since a volume that Kubernetes
// gives to a group is never private itself. Elsewhere a folder that is missing is a mistake.
bool IsVolume(const std::string& folder) {
  struct stat own, above;
  return stat(absl::StrCat(folder, ".").c_str(), &own) == 0 &&
         stat(absl::StrCat(folder, "..").c_str(), &above) == 0 && own.st_dev != above.st_dev;
}

// By doing it: rights and the mount's options are not all.
bool CanMakeFolders(int folder) {
  const std::string name = absl::StrCat(".attnd-", getpid());
  return mkdirat(folder, name.c_str(), 0700) == 0 &&
         unlinkat(folder, name.c_str(), AT_REMOVEDIR) == 0;
}

std::vector<std::string> FolderNames(int folder) {
  std::vector<std::string> names;
  const int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* listing = copy < 0 ? nullptr : fdopendir(copy);
  if (listing == nullptr) {
    if (copy >= 0) close(copy);
    return names;
  }
  while (const dirent* entry = readdir(listing)) {
    if (IsFolderName(entry->d_name)) names.push_back(entry->d_name);
  }
  closedir(listing);
  return names;
}

std::string OwnerOf(const StateFolder& folder) {
  const absl::StatusOr<StateFile> file = folder.Read("caller");
  if (!file.ok() || file->size() != kOwnerBytes) return "";
  std::string owner(kOwnerBytes, '\0');
  const absl::Status read =
      file->Read(0, {reinterpret_cast<std::byte*>(owner.data()), owner.size()});
  return read.ok() ? owner : "";
}

absl::Status OverQuota(absl::string_view whose, int64_t most, int64_t bytes) {
  return Failure(
      absl::StatusCode::kResourceExhausted, reason::kModuleQuota,
      absl::StrCat("module_state_mib: states of ", whose, " may take ", most,
                   " bytes; with this module's they would take ", bytes,
                   ". A state goes with the release of its module, or when its module was not "
                   "registered for --module_state_days"),
      {{"limit", "module_state_mib"},
       {"value", absl::StrCat(most)},
       {"bytes", absl::StrCat(bytes)}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateRoot>> StateRoot::Open(const std::string& path,
                                                           const StateLimits& limits,
                                                           std::unique_ptr<StateDisk> disk) {
  if (IsVolume(path.substr(0, path.rfind('/') + 1)) && mkdir(path.c_str(), 0700) != 0 &&
      errno != EEXIST) {
    return WrongRoot(path, std::strerror(errno));
  }
  FileDescriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC));
  if (!folder.valid()) return WrongRoot(path, std::strerror(errno));
  const std::string why = WhyNotPrivate(folder.get());
  if (!why.empty()) return WrongRoot(path, why);
  if (!CanMakeFolders(folder.get())) return WrongRoot(path, std::strerror(errno));
  auto root = std::unique_ptr<StateRoot>(new StateRoot(std::move(disk), std::move(folder), limits));
  root->Scan();
  return root;
}

void StateRoot::Scan() {
  for (const std::string& name : FolderNames(folder_.get())) {
    const absl::StatusOr<StateFolder> folder = StateFolder::OpenOld(*disk_, folder_.get(), name);
    if (!folder.ok()) continue;
    const Entry entry = {OwnerOf(*folder), folder->Bytes()};
    absl::MutexLock lock(&mutex_);
    bytes_ += entry.bytes;
    entries_[name] = entry;
  }
}

absl::StatusOr<StateRoot::Entry> StateRoot::Reserve(const std::string& name,
                                                    const std::string& caller, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(name);
  const Entry before = found == entries_.end() ? Entry() : found->second;
  const int64_t more = bytes - before.bytes;
  int64_t of_caller = bytes;
  for (const auto& [folder, entry] : entries_) {
    if (folder != name && entry.caller == caller) of_caller += entry.bytes;
  }
  if (more > 0 && of_caller > limits_.bytes / 2) {
    return OverQuota("one caller", limits_.bytes / 2, of_caller);
  }
  if (more > 0 && bytes_ > limits_.bytes - more) {
    return OverQuota("all callers", limits_.bytes, bytes_ + more);
  }
  bytes_ += more;
  entries_[name] = {caller, bytes};
  return before;
}

absl::StatusOr<StateFolder> StateRoot::OpenFolder(const std::string& caller,
                                                  const std::string& name, int64_t bytes) {
  const std::string folder_name = HexDigest(absl::StrCat(caller.size(), ":", caller, name));
  const std::string owner = HexDigest(caller);
  ASSIGN_OR_RETURN(const Entry before, Reserve(folder_name, owner, bytes));
  absl::StatusOr<StateFolder> folder = StateFolder::Open(*disk_, folder_.get(), folder_name);
  absl::Status status = folder.status();
  if (status.ok() && OwnerOf(*folder) != owner) {
    absl::StatusOr<NewStateFile> file = folder->Create("caller");
    status = file.ok() ? file->Write(owner) : file.status();
  }
  if (status.ok()) {
    folder->Touch();
    return folder;
  }
  absl::MutexLock lock(&mutex_);
  bytes_ += before.bytes - bytes;
  entries_[folder_name] = before;
  return status;
}

void StateRoot::Close(const StateFolder& folder, bool removed) {
  folder.Touch();
  const int64_t bytes = removed ? 0 : folder.Bytes();
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(folder.name());
  if (found == entries_.end()) return;
  bytes_ += bytes - found->second.bytes;
  found->second.bytes = bytes;
  if (removed) entries_.erase(found);
}

absl::Status StateRoot::Sync() const {
  return disk_->Sync(folder_.get()) == 0
             ? absl::OkStatus()
             : StateUnavailable("cannot sync", "the folder of all states");
}

void StateRoot::Sweep(absl::Time now) {
  for (const std::string& name : FolderNames(folder_.get())) {
    struct stat of {};  // a lock would be in the way of a registration
    if (fstatat(folder_.get(), name.c_str(), &of, AT_SYMLINK_NOFOLLOW) != 0 ||
        now - absl::TimeFromTimespec(of.st_mtim) <= limits_.most_unused) {
      continue;
    }
    const absl::StatusOr<StateFolder> folder = StateFolder::OpenOld(*disk_, folder_.get(), name);
    if (!folder.ok() || now - folder->UsedAt() <= limits_.most_unused) continue;
    folder->Remove();
    Close(*folder, true);
    absl::MutexLock lock(&mutex_);
    ++swept_;
  }
}

int64_t StateRoot::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

int64_t StateRoot::swept() const {
  absl::MutexLock lock(&mutex_);
  return swept_;
}

}  // namespace attnd
