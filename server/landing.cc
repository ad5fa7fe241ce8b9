#include "server/landing.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/container/inlined_vector.h"
#include "base/non_temporal_copy.h"

namespace attnd {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;

// Below this an input still lies in cache when the kernel reads it.
int64_t CacheBytes() {
  static const int64_t bytes = [] {
    int64_t level3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return level3 > 0 ? level3 / 2 : int64_t{16} << 20;
  }();
  return bytes;
}

void CopyRange(const MessageBytes& message, ByteRange range, std::byte* to, bool non_temporal) {
  message.ForEachPiece(range, [&](absl::Span<const uint8_t> piece) {
    const auto* from = reinterpret_cast<const std::byte*>(piece.data());
    if (non_temporal) {
      CopyNonTemporal(to, from, piece.size());
    } else {
      std::memcpy(to, from, piece.size());
    }
    to += piece.size();
  });
}

struct Piece {
  ByteRange range;
  std::byte* to;
};

}  // namespace

int64_t Land(const AttentionCall& call, std::byte* const* destination, ThreadPool& pool) {
  bool non_temporal = call.input_bytes() > CacheBytes();
  absl::InlinedVector<Piece, 16> pieces;
  for (const TensorSource& input : call.inputs()) {
    std::byte* to = destination[static_cast<int>(input.tensor)];
    for (int64_t done = 0; done < input.range.size; done += kPieceBytes) {
      int64_t size = std::min(kPieceBytes, input.range.size - done);
      pieces.push_back({{input.range.offset + done, size}, to + done});
    }
  }
  auto copy = [&](int64_t n, int) {
    CopyRange(call.message(), pieces[n].range, pieces[n].to, non_temporal);
  };
  if (call.input_bytes() <= kPieceBytes) {  // not worth waking anybody
    for (size_t n = 0; n < pieces.size(); ++n) copy(static_cast<int64_t>(n), 0);
  } else {
    pool.ParallelFor(static_cast<int64_t>(pieces.size()), copy);
  }
  return call.input_bytes();
}

}  // namespace attnd
