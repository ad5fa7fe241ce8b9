#include "server/modules/module_state.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/large_buffer.h"
#include "base/safetensors.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "server/call/status_details.h"
#include "server/modules/running_digest.h"

namespace attnd {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kCommitBegins = "attnd module state 1";
constexpr uint64_t kMaxHeaderBytes = uint64_t{64} << 20;

struct Part {
  int64_t entry;
  TensorRole role;
  std::string name;
  int64_t bytes;
};

constexpr TensorRole kMoments[] = {TensorRole::kMoment1, TensorRole::kMoment2,
                                   TensorRole::kMoment2Max};
constexpr const char* kMomentNames[] = {"moment1/", "moment2/", "moment2_max/"};

// Weights as they are kept, then moments of trained parameters.
std::vector<Part> PartsOf(const ModuleDescription& module) {
  std::vector<Part> parts;
  const auto& entries = module.table.entries();
  const int64_t element = ElementBytes(module.graph.layout().parameter_element);
  for (size_t n = 0; n < entries.size(); ++n) {
    parts.push_back({static_cast<int64_t>(n), TensorRole::kWeight, "weight/" + entries[n].name,
                     entries[n].elements * element});
  }
  for (int64_t moment = 0; moment < module.optimizer.MomentCount(); ++moment) {
    for (size_t n = 0; n < entries.size(); ++n) {
      if (!entries[n].trained_offset.has_value()) continue;
      parts.push_back({static_cast<int64_t>(n), kMoments[moment],
                       kMomentNames[moment] + entries[n].name, entries[n].elements * 4});
    }
  }
  return parts;
}

// The bytes of the largest.
int64_t LargestPart(const ModuleDescription& module) {
  int64_t most = 0;
  for (const Part& part : PartsOf(module)) most = std::max(most, part.bytes);
  return most;
}

ElementType ElementOf(const Part& part, const ModuleDescription& module) {
  return part.role == TensorRole::kWeight ? module.graph.layout().parameter_element
                                          : ElementType::kFloat32;
}

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::UnavailableError(absl::StrCat(what, " ", path, ": ", std::strerror(errno)));
}

// A file or a folder.
absl::Status SyncFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return Failed("cannot open", path);
  const absl::Status status = fsync(file) == 0 ? absl::OkStatus() : Failed("cannot sync", path);
  close(file);
  return status;
}

absl::Status Ignored(absl::string_view path, absl::string_view why) {
  return absl::DataLossError(absl::StrCat(path, ": ", why, "; it is not loaded"));
}

std::string HeaderOf(const ModuleInstance& instance, const std::string& module,
                     const SavedChange& change) {
  const ModuleDescription& description = instance.description();
  std::vector<SafetensorsEntry> tensors;
  for (const Part& part : PartsOf(description)) {
    tensors.push_back({part.name, std::string(DtypeName(ElementOf(part, description))),
                       description.table.entries()[part.entry].shape, part.bytes});
  }
  return SafetensorsHeader(tensors, {{"module", absl::BytesToHexString(module)},
                                     {"sequence", absl::StrCat(change.sequence)},
                                     {"optimizer_step", absl::StrCat(instance.optimizer_step())},
                                     {"digest", absl::BytesToHexString(change.digest)},
                                     {"reply", absl::BytesToHexString(change.reply)}});
}

// The metadata of a header, if it is that of `module` and of this very registration.
absl::StatusOr<Json> CheckStateHeader(const std::string& path, const std::string& text,
                                      const ModuleDescription& description,
                                      const std::string& module) {
  Json header = Json::parse(text, nullptr, false);
  if (!header.is_object() || !header["__metadata__"].is_object()) {
    return Ignored(path, "not a state of a module");
  }
  const Json& metadata = header["__metadata__"];
  if (metadata.value("module", "") != absl::BytesToHexString(module)) {
    return Ignored(path, "a state of another layout or optimizer");
  }
  int64_t at = 0;
  for (const Part& part : PartsOf(description)) {
    const Json expected = {at, at + part.bytes};
    if (!header[part.name].is_object() || header[part.name]["data_offsets"] != expected) {
      return Ignored(path, "its tensors are not the module's");
    }
    at += part.bytes;
  }
  return metadata;
}

absl::StatusOr<SavedChange> ChangeOf(const std::string& path, const Json& metadata,
                                     int64_t* optimizer_step) {
  SavedChange change;
  for (const char* key : {"sequence", "optimizer_step", "digest", "reply"}) {
    if (!metadata.contains(key) || !metadata[key].is_string()) return Ignored(path, "no number");
  }
  if (!absl::SimpleAtoi(metadata["sequence"].get<std::string>(), &change.sequence) ||
      !absl::SimpleAtoi(metadata["optimizer_step"].get<std::string>(), optimizer_step)) {
    return Ignored(path, "its numbers are none");
  }
  change.digest = absl::HexStringToBytes(metadata["digest"].get<std::string>());
  change.reply = absl::HexStringToBytes(metadata["reply"].get<std::string>());
  return change;
}

struct CommitRecord {
  std::string slot, digest;
};

absl::StatusOr<CommitRecord> ReadCommit(const std::string& path, std::istream& file) {
  std::string begins, slot, digest;
  if (!std::getline(file, begins) || begins != kCommitBegins || !std::getline(file, slot) ||
      !std::getline(file, digest) || digest.size() != 64 || (slot != "a" && slot != "b")) {
    return Ignored(path, "not a commit record of attnd");
  }
  return CommitRecord{slot, digest};
}

absl::StatusOr<std::string> DigestOfFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Ignored(path, "it cannot be read");
  RunningDigest digest;
  std::string buffer(1 << 20, '\0');
  while (file.read(buffer.data(), static_cast<int64_t>(buffer.size())) || file.gcount() > 0) {
    digest.Add(absl::string_view(buffer).substr(0, static_cast<size_t>(file.gcount())));
  }
  return absl::BytesToHexString(digest.Final());
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModuleState>> ModuleState::Open(const StatePlace& place,
                                                               const std::string& caller,
                                                               const std::string& name,
                                                               const std::string& module,
                                                               const Saved& saved) {
  const std::string digest = DigestOf(absl::StrCat(caller.size(), ":", caller, name));
  const std::string path =
      absl::StrCat(place.folder, "/", absl::BytesToHexString(digest).substr(0, 32));
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return Failed("cannot make", path);
  if (place.is_disk) RETURN_IF_ERROR(SyncFile(place.folder));  // knows `path` from now on
  const std::string lock_path = path + "/lock";
  const int lock = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock < 0) return Failed("cannot open", lock_path);
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    close(lock);
    return Failure(absl::StatusCode::kFailedPrecondition, reason::kModuleExists,
                   absl::StrCat("name: another server of this host has the state of ", name),
                   {{"name", name}});
  }
  return std::unique_ptr<ModuleState>(new ModuleState(place, path, module, saved, lock));
}

ModuleState::~ModuleState() {
  if (forget_) {
    for (const char* file : {"/commit", "/a.safetensors", "/b.safetensors", "/lock"}) {
      unlink((path_ + file).c_str());
    }
    rmdir(path_.c_str());
  }
  close(lock_);
}

int64_t ModuleState::BytesOf(const ModuleDescription& module) {
  int64_t bytes = 0;
  for (const Part& part : PartsOf(module)) bytes += part.bytes;
  return 2 * bytes;
}

absl::StatusOr<std::optional<SavedChange>> ModuleState::Load(ModuleInstance& instance) {
  const std::string commit_path = path_ + "/commit";
  std::ifstream commit_file(commit_path);
  if (!commit_file) return std::nullopt;
  ASSIGN_OR_RETURN(const CommitRecord commit, ReadCommit(commit_path, commit_file));
  const std::string path = absl::StrCat(path_, "/", commit.slot, ".safetensors");
  next_is_b_ = commit.slot == "a";  // what is committed stays until the other slot is
  ASSIGN_OR_RETURN(const std::string digest, DigestOfFile(path));
  if (digest != commit.digest) return Ignored(path, "its SHA-256 is not that of the commit record");
  std::ifstream file(path, std::ios::binary);
  uint64_t size = 0;
  if (!file.read(reinterpret_cast<char*>(&size), 8) || size > kMaxHeaderBytes) {
    return Ignored(path, "its header is none");
  }
  std::string text(size, '\0');
  if (!file.read(text.data(), static_cast<int64_t>(size))) return Ignored(path, "it is cut off");
  const ModuleDescription& description = instance.description();
  ASSIGN_OR_RETURN(const Json metadata, CheckStateHeader(path, text, description, module_));
  int64_t optimizer_step = 0;
  ASSIGN_OR_RETURN(SavedChange change, ChangeOf(path, metadata, &optimizer_step));
  ASSIGN_OR_RETURN(const LargeBuffer buffer, LargeBuffer::Make(LargestPart(description)));
  for (const Part& part : PartsOf(description)) {
    const absl::Span<std::byte> bytes(buffer.data(), static_cast<size_t>(part.bytes));
    if (!file.read(reinterpret_cast<char*>(bytes.data()), part.bytes)) {
      return absl::InternalError(absl::StrCat(path, ": it is cut off"));
    }
    RETURN_IF_ERROR(instance.Put(part.entry, part.role, ElementOf(part, description), bytes));
  }
  instance.SetOptimizerStep(optimizer_step);
  return change;
}

absl::Status ModuleState::Sync(const std::string& path) const {
  return place_.is_disk ? SyncFile(path) : absl::OkStatus();
}

absl::Status ModuleState::Save(const ModuleInstance& instance, const SavedChange& change) {
  const std::string slot = next_is_b_ ? "b" : "a";
  const absl::Status status = SaveInto(slot, instance, change);
  if (status.ok()) next_is_b_ = !next_is_b_;
  saved_(status, BytesOf(instance.description()) / 2);
  return status;
}

absl::Status ModuleState::SaveInto(const std::string& slot, const ModuleInstance& instance,
                                   const SavedChange& change) const {
  const std::string path = absl::StrCat(path_, "/", slot, ".safetensors");
  RunningDigest digest;
  {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    const std::string header = HeaderOf(instance, module_, change);
    file << header;
    digest.Add(header);
    const ModuleDescription& description = instance.description();
    ASSIGN_OR_RETURN(const LargeBuffer buffer, LargeBuffer::Make(LargestPart(description)));
    for (const Part& part : PartsOf(description)) {
      const absl::Span<std::byte> bytes(buffer.data(), static_cast<size_t>(part.bytes));
      RETURN_IF_ERROR(instance.Get(part.entry, part.role, ElementOf(part, description), bytes));
      file.write(reinterpret_cast<const char*>(bytes.data()), part.bytes);
      digest.Add({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    }
    file.flush();
    if (!file) return Failed("cannot write", path);
  }
  RETURN_IF_ERROR(Sync(path));
  return Commit(slot, absl::BytesToHexString(digest.Final()));
}

absl::Status ModuleState::Commit(const std::string& slot, const std::string& digest) const {
  const std::string commit = path_ + "/commit", next = commit + ".next";
  {
    std::ofstream file(next, std::ios::trunc);
    file << kCommitBegins << "\n" << slot << "\n" << digest << "\n";
    file.flush();
    if (!file) return Failed("cannot write", next);
  }
  RETURN_IF_ERROR(Sync(next));
  if (rename(next.c_str(), commit.c_str()) != 0) return Failed("cannot rename", next);
  return Sync(path_);
}

}  // namespace attnd
