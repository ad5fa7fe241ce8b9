#include "server/keep/mask_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"

namespace attnd {

absl::StatusOr<std::shared_ptr<const MaskDescription>> MaskTable::Keep(const MaskSpec& spec,
                                                                       const MaskCall& call,
                                                                       absl::string_view caller) {
  ASSIGN_OR_RETURN(std::shared_ptr<const MaskDescription> mask, MaskDescription::Make(spec, call));
  return Keep(std::move(mask), caller);
}

std::shared_ptr<const MaskDescription> MaskTable::Keep(std::shared_ptr<const MaskDescription> mask,
                                                       absl::string_view caller) {
  absl::MutexLock lock(&mutex_);
  DropIdle();
  if (mask->bytes() > std::min(limits_.bytes, limits_.bytes_of_caller)) return mask;
  Masks::Entry* found = masks_.Find(mask->id());
  Masks::Entry& entry = found != nullptr ? *found : Insert(std::move(mask));
  masks_.Touch(entry, clock_.Now());
  Allow(entry, caller);
  return entry.value.mask;
}

absl::StatusOr<std::shared_ptr<const MaskDescription>> MaskTable::Find(absl::string_view id,
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
  Rights::Entry* right = rights_.Find({std::string(caller), key});
  if (right == nullptr) {
    if (counts) ++misses_;
    return Failure(absl::StatusCode::kFailedPrecondition, reason::kMaskUnknown,
                   "problem.mask.id: not known to this server; send the mask itself",
                   {{"field", "problem.mask.id"}});
  }
  if (counts) ++hits_;
  masks_.Touch(*right->value, clock_.Now());
  rights_.Touch(*right, clock_.Now());
  return right->value->value.mask;
}

MaskTableStats MaskTable::stats() const {
  absl::MutexLock lock(&mutex_);
  return {.masks = masks_.size(), .bytes = masks_.bytes(0), .hits = hits_, .misses = misses_};
}

MaskTable::Masks::Entry& MaskTable::Insert(std::shared_ptr<const MaskDescription> mask) {
  const int64_t bytes = mask->bytes();
  masks_.MakeRoom("", 0, bytes, [this](const Masks::ByUse& by_use) {
    mutex_.AssertHeld();
    Forget(*by_use.front());
    return true;
  });
  return masks_.Insert({.key = mask->id(),
                        .owner = "",
                        .bytes = bytes,
                        .idle = limits_.idle,
                        .value = {.mask = std::move(mask), .callers = {}}},
                       clock_.Now());
}

// Keep has checked that the mask fits.
void MaskTable::Allow(Masks::Entry& mask, absl::string_view caller) {
  const std::string name(caller);
  Rights::Entry* right = rights_.Find({name, mask.key});
  if (right != nullptr) return rights_.Touch(*right, clock_.Now());
  rights_.MakeRoom(name, 0, mask.bytes, [this](const Rights::ByUse& by_use) {
    mutex_.AssertHeld();
    Forbid(*by_use.front());
    return true;
  });
  rights_.Insert({.key = {name, mask.key}, .owner = name, .bytes = mask.bytes, .value = &mask},
                 clock_.Now());
  mask.value.callers.insert(name);
}

// Its last caller takes the mask along.
void MaskTable::Forbid(Rights::Entry& right) {
  Masks::Entry& mask = *right.value;
  mask.value.callers.erase(right.owner);
  rights_.Erase(right);
  if (mask.value.callers.empty()) masks_.Erase(mask);
}

void MaskTable::Forget(Masks::Entry& mask) {
  for (const std::string& caller : mask.value.callers) {
    rights_.Erase(*rights_.Find({caller, mask.key}));
  }
  masks_.Erase(mask);
}

void MaskTable::DropIdle() {
  while (Masks::Entry* idle = masks_.Expired(clock_.Now())) Forget(*idle);
}

}  // namespace attnd
