// CompiledMask: a mask's tiles, ready for an engine. The mask is cut into tiles of rows × keys, and
// each tile that holds a visible score is listed: FULL, or with the number of its bitmap in a
// dictionary of the distinct ones. What an engine does not find listed it need not visit.
//
//   MaskDescription + origin + MaskCall + MaskCompileOptions → CompiledMask → one MaskPlan per (b,
//   h)
//
// A plan holds the pattern alone. Options of the call (causal, window, key lengths, lengths of
// packed sequences, bias) are no part of it: engines AND them at run time, so one plan serves every
// length. FULL means that every score that exists is visible: rows below MaskPlan::rows, keys below
// MaskPlan::keys. Bits beyond them are 0. An engine that reads whole tiles cuts by lengths itself.
//
// Heads and batch entries that see the same keys share a plan. Memory and work grow with the tiles
// that are listed and with the borders of what is visible, never with rows × keys. Work is
// estimated before it begins and counted while it is done.
// Immutable once made; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/masks/key_run.h"
#include "attention/masks/mask_description.h"
#include "attention/masks/mask_plan.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

struct MaskCompileOptions {
  MaskTileSize tile;
  bool by_rows = true, by_keys = true;
  bool row_keys = false;
  // Limits over all plans together. A step is one node of an expression on one rectangle, or one
  // row of it on one tile: about 5 to 10 ns.
  int64_t max_steps = int64_t{200} << 20;
  int64_t max_bytes = int64_t{256} << 20;
};

class CompiledMask {
 public:
  // Errors:
  //   InvalidArgument  ValidatePlace's; EmptyRow::kReject is the caller's to apply
  //   OutOfRange       "problem.mask.pattern[2]: expected at most ... steps to compile, got about
  //                    ...": by estimate within a millisecond, or when the count is reached.
  //                    Likewise of bytes.
  static absl::StatusOr<CompiledMask> Make(const MaskDescription& mask, const MaskOrigin& origin,
                                           const MaskCall& call, const MaskCompileOptions& options);

  const MaskPlan& PlanAt(int64_t b, int64_t h) const { return plans_[PlanIndex(b, h)]; }
  // Index into plans() of batch entry or sequence b and query head h.
  int64_t PlanIndex(int64_t b, int64_t h) const {
    return plan_of_[static_cast<size_t>(b * batch_stride_ + h * head_stride_)];
  }
  // Whether plans differ between batch entries, between heads: else one lookup serves all.
  bool varies_by_batch() const { return batch_stride_ != 0; }
  bool varies_by_head() const { return head_stride_ != 0; }
  const std::vector<MaskPlan>& plans() const { return plans_; }
  int64_t bytes() const { return bytes_; }
  int64_t steps() const { return steps_; }  // work done
  int64_t compile_nanoseconds() const { return compile_nanoseconds_; }

 private:
  CompiledMask() = default;

  std::vector<MaskPlan> plans_;
  std::vector<uint32_t> plan_of_;
  int64_t batch_stride_ = 0, head_stride_ = 0;
  int64_t bytes_ = 0, steps_ = 0, compile_nanoseconds_ = 0;
};

// Keys that row `row` of (b, h) sees, before the call's options: ascending runs [begin, end) that
// do not touch. For reports and tests; engines read plans.
absl::StatusOr<std::vector<std::vector<KeyRun>>> MaskRuns(const MaskDescription& mask,
                                                          const MaskOrigin& origin,
                                                          const MaskCall& call, int64_t b,
                                                          int64_t h, int64_t max_steps);

}  // namespace attnd
