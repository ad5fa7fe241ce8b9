#include "server/keep/mask_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"

namespace attnd {

absl::StatusOr<std::shared_ptr<const MaskDescription>> MaskStore::Keep(const MaskSpec& spec,
                                                                       const MaskCall& call,
                                                                       absl::string_view caller) {
  ASSIGN_OR_RETURN(std::shared_ptr<const MaskDescription> mask, MaskDescription::Make(spec, call));
  return Keep(std::move(mask), caller);
}

std::shared_ptr<const MaskDescription> MaskStore::Keep(std::shared_ptr<const MaskDescription> mask,
                                                       absl::string_view caller) {
  absl::MutexLock lock(&mutex_);
  DropIdle();
  if (mask->bytes() > std::min(limits_.bytes, limits_.bytes_of_caller)) return mask;
  auto found = entries_.find(mask->id());
  Entry& entry = found != entries_.end() ? found->second : Insert(std::move(mask));
  std::shared_ptr<const MaskDescription> kept = entry.mask;  // Allow may drop the entry's others
  Touch(entry);
  Allow(entry, caller);
  return kept;
}

absl::StatusOr<std::shared_ptr<const MaskDescription>> MaskStore::Find(absl::string_view id,
                                                                       absl::string_view caller,
                                                                       bool counts) {
  MaskId key;
  if (id.size() != key.size()) {
    return FieldError(reason::kBadField, "problem.mask.id", absl::StrCat(key.size(), " bytes"),
                      absl::StrCat(id.size(), " bytes"));
  }
  std::copy(id.begin(), id.end(), key.begin());
  absl::MutexLock lock(&mutex_);
  DropIdle();
  auto found = entries_.find(key);
  if (found == entries_.end() ||
      found->second.callers.find(caller) == found->second.callers.end()) {
    if (counts) ++misses_;
    return Failure(absl::StatusCode::kFailedPrecondition, reason::kMaskUnknown,
                   "problem.mask.id: not known to this server; send the mask itself",
                   {{"field", "problem.mask.id"}});
  }
  if (counts) ++hits_;
  Touch(found->second);
  Rights& rights = callers_[caller].rights;
  rights.splice(rights.begin(), rights, found->second.callers.find(caller)->second);
  return found->second.mask;
}

MaskStoreStats MaskStore::stats() const {
  absl::MutexLock lock(&mutex_);
  return {.masks = static_cast<int64_t>(entries_.size()),
          .bytes = bytes_,
          .hits = hits_,
          .misses = misses_};
}

MaskStore::Entry& MaskStore::Insert(std::shared_ptr<const MaskDescription> mask) {
  while (bytes_ + mask->bytes() > limits_.bytes) Erase(MaskId(order_.back()));
  bytes_ += mask->bytes();
  order_.push_front(mask->id());
  const MaskId id = mask->id();
  return entries_
      .emplace(id,
               Entry{.mask = std::move(mask), .callers = {}, .used_at = {}, .at = order_.begin()})
      .first->second;
}

void MaskStore::Allow(Entry& entry, absl::string_view caller) {
  Caller& of_caller = callers_[caller];
  auto right = entry.callers.find(caller);
  if (right != entry.callers.end()) {
    of_caller.rights.splice(of_caller.rights.begin(), of_caller.rights, right->second);
    return;
  }
  of_caller.rights.push_front({std::string(caller), entry.mask->id()});
  of_caller.bytes += entry.mask->bytes();
  entry.callers.emplace(caller, of_caller.rights.begin());
  // The newest fits: Keep has checked it.
  while (of_caller.bytes > limits_.bytes_of_caller) {
    Forbid(MaskId(of_caller.rights.back().id), caller);
  }
}

void MaskStore::Touch(Entry& entry) {
  entry.used_at = clock_.Now();
  order_.splice(order_.begin(), order_, entry.at);
}

// Its last caller takes the mask along.
void MaskStore::Forbid(const MaskId& id, absl::string_view caller) {
  Entry& entry = entries_.at(id);
  auto right = entry.callers.find(caller);
  auto of_caller = callers_.find(caller);
  of_caller->second.bytes -= entry.mask->bytes();
  of_caller->second.rights.erase(right->second);
  entry.callers.erase(right);
  if (!entry.callers.empty()) return;
  bytes_ -= entry.mask->bytes();
  order_.erase(entry.at);
  entries_.erase(id);
}

void MaskStore::Erase(const MaskId& id) {
  Entry& entry = entries_.at(id);
  for (auto& [caller, right] : entry.callers) {
    auto of_caller = callers_.find(caller);
    of_caller->second.bytes -= entry.mask->bytes();
    of_caller->second.rights.erase(right);
    if (of_caller->second.rights.empty()) callers_.erase(of_caller);
  }
  bytes_ -= entry.mask->bytes();
  order_.erase(entry.at);
  entries_.erase(id);
}

void MaskStore::DropIdle() {
  const absl::Time before = clock_.Now() - limits_.idle;
  while (!order_.empty() && entries_.at(order_.back()).used_at < before) {
    Erase(MaskId(order_.back()));
  }
}

}  // namespace attnd
