// Carriage: the chunks of one Forward or Backward that come and go over several streams: the call's
// own, and those of Carry.
//
//   the call    Admit, then Claim and Landed for each chunk, AwaitLanded, engine, Leave, End
//   each Carry  AwaitAdmitted, Claim and Landed for each chunk, BroughtAll, AwaitLeaving
//
// A stream of Carry may come before the call does, and each takes what chunks it can: the call
// waits for those alone that have been told that it is admitted. Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "proto/attnd/v1/chunk_grid.h"
#include "proto/attnd/v1/chunk_queue.h"
#include "server/admission/admission.h"
#include "server/admission/staging_pool.h"
#include "server/modules/registered_module.h"

namespace attnd {

// A call has at most so many beside its own: more than eight connections move little more
// (PERFORMANCE.md).
inline constexpr int kCarryStreams = 7;

// One tensor of a Forward or Backward, and the memory where it lies.
struct PayloadSpec {
  int field;
  absl::string_view name;
  int64_t bytes;
  bool is_input;
  bool travels = true;  // false: an output that the caller did not ask for
};

struct StagedPayload {
  Ticket ticket;
  StagingBlock block;  // after the ticket: it is back before the promise
};

struct PlacedPayload {
  PayloadSpec spec;
  std::byte* data;
  // Also its chunks', on their way; null: the caller shares the memory.
  std::shared_ptr<const StagedPayload> block;

  bool IsReceived() const { return block != nullptr && spec.is_input; }
  bool IsSent() const { return block != nullptr && !spec.is_input && spec.travels; }
};

class Carriage {
 public:
  // Where a chunk's bytes go, and what keeps the memory there.
  struct Place {
    std::byte* to;
    std::shared_ptr<const StagedPayload> block;
  };

  // The call's. INVALID_ARGUMENT where another call has its name.
  absl::Status Admit(const std::vector<PlacedPayload>& payloads);
  // After its half-close: until all chunks have landed. Where no stream brings those that are
  // missing: INVALID_ARGUMENT CHUNK_ORDER, or CANCELLED, to be tried again, if there were others.
  // Else what broke another stream, or CallWait's.
  absl::Status AwaitLanded(const CallWait& wait);
  void Leave(std::shared_ptr<ChunkQueue> chunks);
  void End();

  // Counts the bytes of all inputs, once the call has been admitted.
  int64_t input_bytes() const;
  // A chunk has come; its bytes may be written to its place. INVALID_ARGUMENT CHUNK_ORDER.
  absl::StatusOr<Place> Claim(uint64_t field, uint64_t offset, int64_t bytes);
  void Landed(int64_t bytes);

  // A further stream's. CANCELLED where the call does not come, or has ended.
  absl::Status AwaitAdmitted(const CallWait& wait);
  // It brings no more; `status`: why not.
  void BroughtAll(const absl::Status& status);
  // CANCELLED where the call has ended without a reply.
  absl::StatusOr<std::shared_ptr<ChunkQueue>> AwaitLeaving(const CallWait& wait);

 private:
  struct Input {
    PlacedPayload payload;
    ChunkGrid grid;
  };

  mutable absl::Mutex mutex_;
  bool admitted_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_others_ ABSL_GUARDED_BY(mutex_) = false;    // further streams, by now or before
  std::vector<Input> inputs_ ABSL_GUARDED_BY(mutex_);  // none once they have landed
  int64_t input_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t missing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int bringing_ ABSL_GUARDED_BY(mutex_) = 0;     // further streams
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);  // one of them, before all had landed
  std::shared_ptr<ChunkQueue> leaving_ ABSL_GUARDED_BY(mutex_);  // null: not yet
};

// Ends a call's carriage when the call is over, however that comes.
class CarriageLead {
 public:
  CarriageLead() = default;
  explicit CarriageLead(std::shared_ptr<Carriage> carriage) : carriage_(std::move(carriage)) {}
  CarriageLead(CarriageLead&& other) noexcept { *this = std::move(other); }
  CarriageLead& operator=(CarriageLead&& other) noexcept {
    std::swap(carriage_, other.carriage_);
    return *this;
  }
  ~CarriageLead() {
    if (carriage_ != nullptr) carriage_->End();
  }
  Carriage* get() const { return carriage_.get(); }  // null: the call has one stream

 private:
  std::shared_ptr<Carriage> carriage_;
};

// The carriages of all calls, while a stream of theirs is open. Any thread.
class Carriages {
 public:
  // Made by whichever stream of the call comes first.
  std::shared_ptr<Carriage> Of(const std::string& caller, const std::string& name);

 private:
  absl::Mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::weak_ptr<Carriage>> carriages_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
