// ChunkPlacer: takes the data of a streamed call's chunks straight from the socket to their tensors
// (base/payload_receiver.h), and tells which of the messages that gRPC then delivers have been
// dealt with so. It looks at the form of a chunk alone, as ChunkPrefix writes it; any other message
// goes the usual way, and the order of all is checked where they are delivered.
//
// Threads: the one that receives places, the one that takes the messages asks, in their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "base/http2_follower.h"

namespace attnd {

// A chunk, by the bytes that stand before its data.
struct ChunkForm {
  uint64_t field = 0, offset = 0;
  int64_t data_at = 0, data_bytes = 0;
};
// False when the message has another form.
bool ParseChunkForm(absl::Span<const uint8_t> beginning, int64_t message_bytes, ChunkForm& form);

// A tensor that chunks of a field go to.
struct ChunkTarget {
  uint64_t field = 0;
  std::byte* to = nullptr;
  int64_t bytes = 0;
};
// Null when the chunk lies in none of them.
std::byte* FindTarget(absl::Span<const ChunkTarget> targets, const ChunkForm& chunk);

class ChunkPlacer final : public MessagePlacer {
 public:
  // Where a chunk's data go; null: the usual way. On the receiving thread.
  using Where = std::function<std::byte*(const ChunkForm& chunk)>;
  explicit ChunkPlacer(Where where) : where_(std::move(where)) {}

  std::byte* PlaceOf(int64_t index, absl::Span<const uint8_t> beginning, int64_t message_bytes,
                     int64_t came) override;
  void OnPlaced(int64_t index) override;

  // Of the data of the stream's message `index`, which gRPC has delivered as this chunk: how many
  // bytes it has delivered; those after them are in their place. Not asked again for earlier ones.
  // None when some were lost with the connection, or the message was another chunk when it was
  // placed.
  absl::optional<int64_t> DeliveredBytes(int64_t index, uint64_t field, uint64_t offset,
                                         int64_t data_bytes);

 private:
  struct Placed {
    int64_t index;
    ChunkForm chunk;
    int64_t delivered;  // of its data
    bool complete = false;
  };

  const Where where_;
  absl::Mutex mutex_;
  std::deque<Placed> placed_ ABSL_GUARDED_BY(mutex_);  // in the order of their indices
};

}  // namespace attnd
