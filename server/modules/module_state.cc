#include "server/modules/module_state.h"

#include <algorithm>
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
constexpr int64_t kMaxCommitBytes = 1024;
// A header has at most these bytes for each tensor, beside its name, whose bytes JSON may escape;
// and for the rest, in which the reply of the last change is the largest.
constexpr int64_t kHeaderBytesOfPart = 256, kHeaderBytesOfNameByte = 6;
constexpr int64_t kHeaderBytesOfRest = 64 << 10;
constexpr int64_t kReadBytes = 1 << 20;

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
                                     {"reply", absl::BytesToHexString(change.reply)},
                                     {"owner_epoch", absl::StrCat(change.owner_epoch)},
                                     {"history_epoch", absl::StrCat(change.history_epoch)}});
}

// A string of a JSON object; null: it has none of that name.
const std::string* TextIn(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? nullptr : found->get_ptr<const std::string*>();
}

// The metadata of a header, if it is that of `module` and of this very registration.
absl::StatusOr<Json> CheckStateHeader(const std::string& path, const std::string& text,
                                      const ModuleDescription& description,
                                      const std::string& module) {
  const Json header = Json::parse(text, nullptr, false);
  if (!header.is_object()) return Ignored(path, "not a state of a module");
  const auto metadata = header.find("__metadata__");
  if (metadata == header.end() || !metadata->is_object()) {
    return Ignored(path, "not a state of a module");
  }
  const std::string* of = TextIn(*metadata, "module");
  if (of == nullptr || *of != absl::BytesToHexString(module)) {
    return Ignored(path, "a state of another layout or optimizer");
  }
  int64_t at = 0;
  for (const Part& part : PartsOf(description)) {
    const Json expected = {at, at + part.bytes};
    const auto tensor = header.find(part.name);
    const bool is_object = tensor != header.end() && tensor->is_object();
    if (!is_object || !tensor->contains("data_offsets") ||
        *tensor->find("data_offsets") != expected) {
      return Ignored(path, "its tensors are not the module's");
    }
    at += part.bytes;
  }
  return *metadata;
}

// Absent from states of earlier versions: 0.
bool EpochIn(const Json& metadata, const char* key, uint64_t& epoch) {
  const std::string* text = TextIn(metadata, key);
  return text == nullptr || absl::SimpleAtoi(*text, &epoch);
}

absl::StatusOr<SavedChange> ChangeOf(const std::string& path, const Json& metadata,
                                     int64_t* optimizer_step) {
  const std::string* texts[4];
  const char* const keys[4] = {"sequence", "optimizer_step", "digest", "reply"};
  for (int n = 0; n < 4; ++n) {
    texts[n] = TextIn(metadata, keys[n]);
    if (texts[n] == nullptr) return Ignored(path, absl::StrCat("it has no ", keys[n]));
  }
  SavedChange change;
  if (!absl::SimpleAtoi(*texts[0], &change.sequence) ||
      !absl::SimpleAtoi(*texts[1], optimizer_step) ||
      !EpochIn(metadata, "owner_epoch", change.owner_epoch) ||
      !EpochIn(metadata, "history_epoch", change.history_epoch)) {
    return Ignored(path, "its numbers are none");
  }
  change.digest = absl::HexStringToBytes(*texts[2]);
  change.reply = absl::HexStringToBytes(*texts[3]);
  return change;
}

// Reads the text of `file` from `offset` on.
absl::StatusOr<std::string> TextOf(const StateFile& file, int64_t offset, int64_t size) {
  std::string text(static_cast<size_t>(size), '\0');
  RETURN_IF_ERROR(file.Read(offset, {reinterpret_cast<std::byte*>(text.data()), text.size()}));
  return text;
}

absl::StatusOr<std::string> DigestOfFile(const StateFile& file) {
  RunningDigest digest;
  for (int64_t at = 0; at < file.size(); at += kReadBytes) {
    ASSIGN_OR_RETURN(const std::string text,
                     TextOf(file, at, std::min(kReadBytes, file.size() - at)));
    digest.Add(text);
  }
  return absl::BytesToHexString(digest.Final());
}

bool IsSlot(absl::string_view slot, absl::string_view digest) {
  return (slot == "a" || slot == "b") && digest.size() == 64;
}

std::string FileOf(absl::string_view slot) { return absl::StrCat(slot, ".safetensors"); }

// Counts the bytes of one slot's tensors.
int64_t SlotBytesOf(const ModuleDescription& module) {
  int64_t bytes = 0;
  for (const Part& part : PartsOf(module)) bytes += part.bytes;
  return bytes;
}

int64_t MostHeaderBytes(const ModuleDescription& module) {
  int64_t bytes = kHeaderBytesOfRest;
  for (const Part& part : PartsOf(module)) {
    bytes += kHeaderBytesOfPart;
    bytes += kHeaderBytesOfNameByte * static_cast<int64_t>(part.name.size());
  }
  return bytes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModuleState>> ModuleState::Open(const StatePlace& place,
                                                               const Owner& owner, int64_t bytes,
                                                               const Saved& saved) {
  absl::StatusOr<StateFolder> folder = place.root->OpenFolder(owner.caller, owner.name, bytes);
  if (absl::IsFailedPrecondition(folder.status())) {
    return Failure(absl::StatusCode::kFailedPrecondition, reason::kModuleExists,
                   absl::StrCat("name: another server of this host has the state of ", owner.name),
                   {{"name", owner.name}});
  }
  RETURN_IF_ERROR(folder.status());
  auto state =
      std::unique_ptr<ModuleState>(new ModuleState(place, *std::move(folder), owner.module, saved));
  if (place.is_disk) {
    // A process that died may have renamed a record and not synced it. What is loaded counts as
    // durable, so it is synced before.
    RETURN_IF_ERROR(state->folder_.Sync());
    RETURN_IF_ERROR(place.root->Sync());  // it knows the folder from now on
  }
  return state;
}

ModuleState::~ModuleState() {
  if (forget_) folder_.Remove();
  place_.root->Close(folder_, forget_);
}

int64_t ModuleState::BytesOf(const ModuleDescription& module) { return 2 * SlotBytesOf(module); }

int64_t ModuleState::FileBytesOf(const ModuleDescription& module) {
  return 2 * (SlotBytesOf(module) + MostHeaderBytes(module)) + 2 * kMaxCommitBytes;
}

// The slot that counts, then the other one, as far as the record names it.
absl::StatusOr<std::vector<ModuleState::Slot>> ModuleState::ReadCommit() const {
  const absl::StatusOr<StateFile> file = folder_.Read("commit");
  if (absl::IsNotFound(file.status())) return std::vector<Slot>();
  RETURN_IF_ERROR(file.status());
  const absl::Status foreign = Ignored(file->name(), "not a commit record of attnd");
  if (file->size() > kMaxCommitBytes) return foreign;
  ASSIGN_OR_RETURN(const std::string text, TextOf(*file, 0, file->size()));
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  if (lines.size() < 4 || lines[0] != kCommitBegins || !IsSlot(lines[1], lines[2])) return foreign;
  const std::string other = lines[1] == "a" ? "b" : "a";
  std::vector<Slot> slots = {{lines[1], lines[2]}};
  if (IsSlot(other, lines[3])) slots.push_back({other, lines[3]});
  return slots;
}

absl::StatusOr<ModuleState::Loaded> ModuleState::Load(ModuleInstance& instance) {
  Loaded loaded;
  const absl::StatusOr<std::vector<Slot>> slots = ReadCommit();
  if (absl::IsUnavailable(slots.status())) return slots.status();
  if (!slots.ok()) {
    loaded.damage = slots.status();
    return loaded;
  }
  for (const Slot& slot : *slots) {
    absl::StatusOr<SavedChange> change = LoadSlot(slot, instance);
    if (change.ok()) {
      committed_ = slot;  // it stays until the other slot is committed
      loaded.change = *std::move(change);
      return loaded;
    }
    const absl::StatusCode code = change.status().code();
    if (code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnavailable) {
      return change.status();
    }
    if (loaded.damage.ok()) loaded.damage = change.status();
  }
  return loaded;
}

absl::StatusOr<SavedChange> ModuleState::LoadSlot(const Slot& slot,
                                                  ModuleInstance& instance) const {
  const ModuleDescription& description = instance.description();
  ASSIGN_OR_RETURN(const StateFile file, folder_.Read(FileOf(slot.name)));
  const int64_t header_bytes = file.size() - SlotBytesOf(description) - 8;
  if (header_bytes < 0 || header_bytes > MostHeaderBytes(description)) {
    return Ignored(file.name(), "its size is not that of the module's state");
  }
  ASSIGN_OR_RETURN(const std::string digest, DigestOfFile(file));
  if (digest != slot.digest) {
    return Ignored(file.name(), "its SHA-256 is not that of the commit record");
  }
  int64_t told = 0;
  RETURN_IF_ERROR(file.Read(0, {reinterpret_cast<std::byte*>(&told), sizeof(told)}));
  if (told != header_bytes) return Ignored(file.name(), "its header is none");
  ASSIGN_OR_RETURN(const std::string text, TextOf(file, 8, header_bytes));
  ASSIGN_OR_RETURN(const Json metadata, CheckStateHeader(file.name(), text, description, module_));
  int64_t optimizer_step = 0;
  ASSIGN_OR_RETURN(SavedChange change, ChangeOf(file.name(), metadata, &optimizer_step));
  ASSIGN_OR_RETURN(const LargeBuffer buffer, LargeBuffer::Make(LargestPart(description)));
  int64_t at = 8 + header_bytes;
  for (const Part& part : PartsOf(description)) {
    const absl::Span<std::byte> bytes(buffer.data(), static_cast<size_t>(part.bytes));
    if (absl::Status read = file.Read(at, bytes); !read.ok()) {
      return StateUnavailable(read.message());  // a while ago it was whole
    }
    if (absl::Status put = instance.Put(part.entry, part.role, ElementOf(part, description), bytes);
        !put.ok()) {
      return absl::InternalError(put.message());
    }
    at += part.bytes;
  }
  instance.SetOptimizerStep(optimizer_step);
  return change;
}

absl::Status ModuleState::Save(const ModuleInstance& instance, const SavedChange& change) {
  absl::StatusOr<Slot> slot = SaveInto(committed_.name == "a" ? "b" : "a", instance, change);
  absl::Status status = slot.ok() ? Commit(*slot) : slot.status();
  if (status.ok()) committed_ = *std::move(slot);
  saved_(status, BytesOf(instance.description()) / 2);
  return status;
}

absl::StatusOr<ModuleState::Slot> ModuleState::SaveInto(const std::string& slot,
                                                        const ModuleInstance& instance,
                                                        const SavedChange& change) const {
  ASSIGN_OR_RETURN(NewStateFile file, folder_.Create(FileOf(slot)));
  RunningDigest digest;
  const std::string header = HeaderOf(instance, module_, change);
  RETURN_IF_ERROR(file.Write(header));
  digest.Add(header);
  const ModuleDescription& description = instance.description();
  ASSIGN_OR_RETURN(const LargeBuffer buffer, LargeBuffer::Make(LargestPart(description)));
  for (const Part& part : PartsOf(description)) {
    const absl::Span<std::byte> bytes(buffer.data(), static_cast<size_t>(part.bytes));
    RETURN_IF_ERROR(instance.Get(part.entry, part.role, ElementOf(part, description), bytes));
    const absl::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    RETURN_IF_ERROR(file.Write(text));
    digest.Add(text);
  }
  if (place_.is_disk) RETURN_IF_ERROR(file.Sync());
  return Slot{slot, absl::BytesToHexString(digest.Final())};
}

// The slot committed before becomes the other one of the record.
absl::Status ModuleState::Commit(const Slot& slot) const {
  {
    ASSIGN_OR_RETURN(NewStateFile file, folder_.Create("commit.next"));
    RETURN_IF_ERROR(file.Write(absl::StrCat(kCommitBegins, "\n", slot.name, "\n", slot.digest, "\n",
                                            committed_.digest, "\n")));
    if (place_.is_disk) RETURN_IF_ERROR(file.Sync());
  }
  RETURN_IF_ERROR(folder_.Rename("commit.next", "commit"));
  return place_.is_disk ? folder_.Sync() : absl::OkStatus();
}

}  // namespace attnd
