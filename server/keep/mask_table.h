// MaskTable: the masks that callers have sent, by content id, so that a later call names one in 32
// bytes. One object for each id: equal masks are equal pointers. Storage is shared; a caller may
// name only what it has sent itself, so that an id tells nothing of other callers' data.
//
// Best effort: a mask expires when nobody uses it for a while, and the least recently used goes
// first when room is short. Calls that run, and residuals, keep their masks alive by themselves.
// Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "attention/mask_plans.h"
#include "attention/masks/mask_description.h"
#include "base/clock.h"
#include "server/keep/kept_table.h"

namespace attnd {

struct MaskTableLimits {
  int64_t bytes = int64_t{256} << 20;
  int64_t bytes_of_caller = int64_t{64} << 20;  // and of one mask's lists outside its message
  absl::Duration idle = absl::Minutes(10);      // forgotten after
};

struct MaskTableStats {
  int64_t masks = 0, bytes = 0;
  uint64_t hits = 0, misses = 0;  // of calls that named an id
};

class MaskTable {
 public:
  // `clock` outlives it. `plans`: null for its own.
  MaskTable(const MaskTableLimits& limits, const Clock& clock,
            std::shared_ptr<MaskPlans> plans = nullptr)
      : limits_(limits),
        clock_(clock),
        plans_(plans != nullptr ? std::move(plans) : std::make_shared<MaskPlans>(limits.bytes)),
        masks_({limits.bytes}, Masks::kNoLimit),
        rights_({Rights::kNoLimit}, limits.bytes_of_caller) {}

  // Checks the mask and remembers it for the caller. INVALID_ARGUMENT names the field.
  absl::StatusOr<std::shared_ptr<const MaskDescription>> Keep(const MaskSpec& spec,
                                                              const MaskCall& call,
                                                              absl::string_view caller);
  // The same of one that has been checked. Comes back as the table has it.
  std::shared_ptr<const MaskDescription> Keep(std::shared_ptr<const MaskDescription> mask,
                                              absl::string_view caller);
  // FAILED_PRECONDITION MASK_UNKNOWN when the caller has not sent it, or it is forgotten.
  // INVALID_ARGUMENT when `id` is none.
  absl::StatusOr<std::shared_ptr<const MaskDescription>> Find(absl::string_view id,
                                                              absl::string_view caller,
                                                              bool counts = true);
  MaskTableStats stats() const;
  const MaskTableLimits& limits() const { return limits_; }
  // Compiled forms of these masks, as engines visit them.
  MaskPlans& plans() { return *plans_; }

 private:
  struct Sent {
    std::shared_ptr<const MaskDescription> mask;
    absl::flat_hash_set<std::string> callers;  // who have sent it
  };
  using Masks = KeptTable<MaskId, Sent>;  // no owners: a mask counts once
  // A caller's right to name a mask counts the mask's bytes to it. The mask's idle time ends it.
  using Rights = KeptTable<std::pair<std::string, MaskId>, Masks::Entry*>;

  Masks::Entry& Insert(std::shared_ptr<const MaskDescription> mask)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Allow(Masks::Entry& mask, absl::string_view caller) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forbid(Rights::Entry& right) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(Masks::Entry& mask) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const MaskTableLimits limits_;
  const Clock& clock_;
  const std::shared_ptr<MaskPlans> plans_;
  mutable absl::Mutex mutex_;
  Masks masks_ ABSL_GUARDED_BY(mutex_);
  Rights rights_ ABSL_GUARDED_BY(mutex_);
  uint64_t hits_ ABSL_GUARDED_BY(mutex_) = 0, misses_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Lists of a mask that follow a streamed call's header.
struct StreamedMaskData {
  int64_t wanted = 0;  // set by decoding the header
  std::string bytes;   // what has come; taken when the header is decoded again
};

struct SharedRequest;
struct TensorSpec;
// A copy of a tensor in a call's shared memory.
using ReadShared =
    std::function<absl::StatusOr<std::string>(const SharedRequest&, const TensorSpec&)>;

// The table as one caller sees it. Both outlive it.
struct CallersMasks {
  MaskTable& table;
  absl::string_view caller;
  // Null: all is done at once. Else a mask that may take long ends the decoding, with an error that
  // says nothing, and sets this: decode again where there is time (MaskWorkers).
  bool* takes_long = nullptr;
  bool is_repeated = false;          // decoded a second time for that: the table counts calls once
  ReadShared read_shared = nullptr;  // of a call that may have shared memory
  StreamedMaskData* streamed = nullptr;  // of a streamed call
};

}  // namespace attnd
