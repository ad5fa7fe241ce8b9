#include "kernels/cuda/device/pinned_piece.h"

#include <functional>
#include <iterator>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd::cuda {
namespace {

struct Pieces {
  absl::Mutex mutex;
  std::map<const std::byte*, size_t, std::less<>> sizes ABSL_GUARDED_BY(mutex);
};

Pieces& OfProcess() {
  static auto* const pieces = new Pieces;
  return *pieces;
}

}  // namespace

PinnedPiece::PinnedPiece(absl::Span<const std::byte> memory) : begin_(memory.data()) {
  Pieces& all = OfProcess();
  absl::MutexLock lock(&all.mutex);
  all.sizes[begin_] = memory.size();
}

PinnedPiece::~PinnedPiece() {
  Pieces& all = OfProcess();
  absl::MutexLock lock(&all.mutex);
  all.sizes.erase(begin_);
}

const std::byte* PinnedPiece::BeginOf(const std::byte* at) {
  Pieces& all = OfProcess();
  absl::MutexLock lock(&all.mutex);
  const auto next = all.sizes.upper_bound(at);
  if (next == all.sizes.begin()) return nullptr;
  const auto& [begin, size] = *std::prev(next);
  return at < begin + size ? begin : nullptr;
}

}  // namespace attnd::cuda
