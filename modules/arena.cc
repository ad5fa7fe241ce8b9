#include "modules/arena.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <queue>
#include <utility>

#include "base/check.h"
#include "base/free_ranges.h"
#include "base/round_up.h"

namespace attnd {
namespace {

// One after the other as they begin; what has ended is given back before.
class Placement {
 public:
  explicit Placement(int64_t capacity) : free_(capacity) {}

  void Place(ArenaBuffer& buffer) {
    while (!alive_.empty() && alive_.top().first < buffer.first) {
      free_.Give(alive_.top().second.first, alive_.top().second.second);
      alive_.pop();
    }
    const int64_t bytes = RoundUp(buffer.bytes, kArenaAlignment);
    if (bytes == 0) return;
    const std::optional<int64_t> offset = free_.Take(bytes);
    CHECK(offset.has_value()) << bytes;  // the capacity is the sum of all
    buffer.offset = *offset;
    alive_.push({buffer.last, {*offset, bytes}});
    size_ = std::max(size_, *offset + bytes);
  }
  int64_t size() const { return size_; }

 private:
  using Alive = std::pair<int64_t, std::pair<int64_t, int64_t>>;  // last, (offset, bytes)
  FreeRanges free_;
  std::priority_queue<Alive, std::vector<Alive>, std::greater<Alive>> alive_;
  int64_t size_ = 0;
};

}  // namespace

int64_t PlaceBuffers(std::vector<ArenaBuffer>& buffers) {
  int64_t capacity = 0;
  for (const ArenaBuffer& buffer : buffers) capacity += RoundUp(buffer.bytes, kArenaAlignment);
  if (capacity == 0) return 0;
  std::vector<size_t> order(buffers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return buffers[a].first < buffers[b].first; });
  Placement placement(capacity);
  for (size_t n : order) placement.Place(buffers[n]);
  return placement.size();
}

}  // namespace attnd
