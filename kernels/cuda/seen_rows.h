// Which of a call's keys some row sees, and which of its rows see something. Only these decide the
// powers of two by which float32 and bfloat16 travel (transfer.cc), so that large numbers in
// padding cost the others nothing. Place by place, which is slow under a mask by description; but
// a question is asked of the largest numbers alone, and mostly the first row or key answers it.
// One thread. Errors: none.
#pragma once

#include <cstdint>
#include <optional>

#include "attention/masks/mask_oracle.h"
#include "attention/problem.h"

namespace attnd::cuda {

class SeenRows {
 public:
  // All outlive it. `mask_bits` and `bias` are null where they are not at hand: then they show all.
  SeenRows(const Problem& problem, const void* mask_bits, const void* bias);
  SeenRows(const SeenRows&) = delete;

  bool IsKeySeen(int64_t b, int64_t kv_head, int64_t key) const;  // by a row of the group
  bool SeesAny(int64_t b, int64_t q_head, int64_t row) const;

 private:
  bool IsShown(int64_t b, int64_t q_head, int64_t row, int64_t key) const;

  const Problem& problem_;
  const uint8_t* const mask_bits_;
  const void* const bias_;
  MaskSpec mask_spec_;  // described_ refers to both
  MaskCall mask_call_;
  std::optional<MaskOracle> described_;
};

}  // namespace attnd::cuda
