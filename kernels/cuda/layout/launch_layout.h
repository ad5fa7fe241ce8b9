// Launch layout: where each tensor of a launch's calls lies in the device's arena.
//
// Use: lay out (LayOut…), reserve the arena, then describe (descriptors.h) with its address.
// Nothing here touches a device. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "attention/problem.h"
#include "attention/residue_classes.h"
#include "kernels/cuda/device/kernel_device.h"
#include "kernels/cuda/layout/staging.h"
#include "kernels/cuda/masks/mask_cache.h"
#include "kernels/cuda/masks/mask_layout.h"
#include "kernels/rules/params.h"

namespace attnd::cuda {

// Offsets into the arena; −1: this call has no such tensor. Those that lie outside it
// (PlaceOutside) may be any other number.
struct CallLayout {
  const Problem* problem = nullptr;
  // Its rows and keys go by residue, each class a problem of its own on strided rows; lse and what
  // has its shape stand class after class within a sequence (class_order.h).
  std::optional<ResidueClasses> classes;
  Travel travel = Travel::kAsHalves;
  int64_t q = -1, k = -1, v = -1, o = -1, lse = -1;
  int64_t mask = -1, bias = -1, alibi = -1, sink = -1, sequences = -1;
  int64_t d_o = -1, d_lse = -1, d_q = -1, d_k = -1, d_v = -1, d_bias = -1, d_sink = -1;
  int64_t delta = -1, stabilizer = -1, dq_factor = -1;
  int64_t dq_sums = -1, dq_non_finite = -1, gradient_bounds = -1, gains = -1, key_sizes = -1;
  int64_t dq_head = 0, dq_block = 0, dq_rest = 0, non_finite_head = 0;  // see ProblemDesc
  int64_t gains_head = 0, most_keys = 0;
  bool dq_rests_by_row = false, dq_is_integer = true;
  // A kept bfloat16 forward: V and O stand in the arena, and once more with the other tensors.
  bool keeps_rows = false;
  bool is_elsewhere = false;      // LayOutElsewhere
  RowStrides strides, d_strides;  // then
  int64_t kept_v = 0, kept_o = 0;
  int64_t tile_lists = -1;  // where mask_lists begins; meaningless where it has no bytes
  MaskLayout mask_lists;
};

// Which rows of dQ have a second integer (ProblemDesc).
enum class DqRests : unsigned char { kNone, kOfAllRows, kByRow };
// How backward sums dQ. `are_zeroed`: by the host.
struct DqSums {
  int tile_head_dim = 0;
  DqRests rests = DqRests::kNone;
  bool are_integers = true, are_zeroed = true;
};

class ArenaLayout {
 public:
  int64_t Add(std::string name, int64_t bytes, RegionUse use);  // the region's offset
  absl::Span<const Region> regions() const { return regions_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<Region> regions_;
  int64_t bytes_ = 0;
};

// Problems that each batch entry is cut into, at least 1: some may be empty.
int64_t ClassCount(const Problem& problem, const std::optional<ResidueClasses>& classes);

RowShape QueryRows(const Problem& problem);
RowShape KeyRows(const Problem& problem);
RowShape ValueRows(const Problem& problem);
RowShape OutputRows(const Problem& problem);

// Where a call's tensors go, in the order of backend.h: what forward reads and writes and leaves
// for backward (`results` is lse's and o's use), then what backward adds. `tile_head_dim` is of the
// backward kernel's tile.
CallLayout LayOutTensors(const Problem& problem, RegionUse results, ArenaLayout& arena,
                         Travel travel = Travel::kAsHalves);
// The same of a forward whose tensors stay in memory of their own, `kept`: what it reads or writes
// in another scale than backward (V and O of bfloat16 as halves) stands in the arena too.
CallLayout LayOutKeptTensors(const Problem& problem, ArenaLayout& kept, ArenaLayout& arena,
                             Travel travel);
// The same where all tensors lie in the device's memory, as the kernels read them: only a mask's
// bits stand in the arena. PlaceTensors says where the rest is.
CallLayout LayOutElsewhere(const Problem& problem, ArenaLayout& arena, Travel travel);
// Device addresses; of a forward those of its tensors alone. There is no gradient of lse.
struct TensorAddresses {
  uint64_t q = 0, k = 0, v = 0, o = 0, lse = 0, d_o = 0, d_q = 0, d_k = 0, d_v = 0;
  RowStrides strides, d_strides;
};
void PlaceTensors(CallLayout& layout, const TensorAddresses& addresses, uint64_t arena);
// Lays out what scores are made of, and lse: all that a capture reads.
CallLayout LayOutScores(const Problem& problem, ArenaLayout& arena, Travel travel);
void LayOutGradients(CallLayout& layout, const DqSums& sums, ArenaLayout& arena);
// The lists of its mask, of either kind. `mask`: null, or that of a mask by description; what is
// held elsewhere is not in the arena: PlaceMask says where.
void LayOutTileLists(CallLayout& layout, const MaskTiling& tiling, const CallMask* mask,
                     ArenaLayout& arena);
void PlaceMask(CallLayout& layout, int64_t offset);
// For tensors that were laid out for a memory of their own, which begins `shift` bytes after the
// arena (or before it).
void PlaceOutside(CallLayout& layout, int64_t shift);
// Lays out what the problem itself holds: slopes, sink logits, sequences. They come after the
// tensors of all calls, so that one copy brings the small things of a launch.
void LayOutConstants(CallLayout& layout, ArenaLayout& arena);

}  // namespace attnd::cuda
