// PinnedPiece: a piece of page-locked memory while it lives. One copy may not touch two of them.
// The system locks pages for all devices, whichever asked for it, so all devices of the process
// know all pieces. Any thread.
#pragma once

#include <cstddef>

#include "absl/types/span.h"

namespace attnd::cuda {

class PinnedPiece {
 public:
  explicit PinnedPiece(absl::Span<const std::byte> memory);
  ~PinnedPiece();
  PinnedPiece(const PinnedPiece&) = delete;
  PinnedPiece& operator=(const PinnedPiece&) = delete;

  // Where the piece begins that has this byte; null: none has it.
  static const std::byte* BeginOf(const std::byte* at);

 private:
  const std::byte* const begin_;
};

}  // namespace attnd::cuda
