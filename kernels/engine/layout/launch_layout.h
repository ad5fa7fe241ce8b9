// Launch layout: how calls become one launch: where each tensor lies in the device's arena, which
// parts each call is cut into, and the descriptors and tile lists that the kernels read
// (kernels/rules/params.h).
//
// A part is what one ProblemDesc describes: a whole call, or in bfloat16 one (batch entry, KV head)
// of it, because each of those has powers of two of its own (staging.h).
//
// Use: lay out (LayOut…), reserve the arena, then describe (Describe…) with its address. Nothing
// here touches a device. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "attention/problem.h"
#include "kernels/engine/device/kernel_device.h"
#include "kernels/engine/layout/staging.h"
#include "kernels/rules/params.h"

namespace attnd::cuda {

// Offsets into the arena; −1: this call has no such tensor. Those that lie outside it
// (PlaceOutside) may be any other number.
struct CallLayout {
  const Problem* problem = nullptr;
  int64_t q = -1, k = -1, v = -1, o = -1, lse = -1;
  int64_t mask = -1, bias = -1, alibi = -1, sink = -1, sequences = -1;
  int64_t d_o = -1, d_lse = -1, d_q = -1, d_k = -1, d_v = -1, d_bias = -1, d_sink = -1;
  int64_t delta = -1, stabilizer = -1, dq_factor = -1;
  int64_t dq_sums = -1, dq_non_finite = -1, gradient_bounds = -1;
  int64_t dq_head = 0, dq_rest = 0, non_finite_head = 0;  // see ProblemDesc
  // A kept bfloat16 forward: V and O stand in the arena, and once more with the other tensors.
  bool keeps_rows = false;
  int64_t kept_v = 0, kept_o = 0;
  int64_t tile_lists = -1;
  TileLists lists = {};  // without their address
};

// The powers of two that a part's tensors were divided by; 0 in float16. kept_v: what a forward's
// V and O are divided by for backward.
struct Exponents {
  int q = 0, k = 0, v = 0, d_o = 0, kept_v = 0;
};

struct Part {
  int call = 0;  // index in the launch
  int64_t batch_begin = 0, batches = 0;
  int64_t kv_head_begin = 0, kv_heads = 0;
  Exponents exponents;
};

// The tiles of a kernel, of which a bool mask's are listed: in lines of its key tiles (backward) or
// of its row tiles.
struct MaskTiling {
  int rows = 0, keys = 0;
  bool by_keys = false;
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

RowShape QueryRows(const Problem& problem);
RowShape KeyRows(const Problem& problem);
RowShape ValueRows(const Problem& problem);
RowShape OutputRows(const Problem& problem);

// Where a call's tensors go, in the order of backend.h: what forward reads and writes and leaves
// for backward (`results` is lse's and o's use), then what backward adds. `tile_head_dim` is of the
// backward kernel's tile; `dq_rest`: dQ has a second integer (ProblemDesc).
CallLayout LayOutTensors(const Problem& problem, RegionUse results, ArenaLayout& arena);
// The same of a forward whose tensors stay in memory of their own, `kept`: what it reads or writes
// in another scale than backward (V and O in bfloat16) stands in the arena too.
CallLayout LayOutKeptTensors(const Problem& problem, ArenaLayout& kept, ArenaLayout& arena);
void LayOutGradients(CallLayout& layout, int tile_head_dim, bool dq_rest, ArenaLayout& arena);
// Nothing without a bool mask.
void LayOutTileLists(CallLayout& layout, const MaskTiling& tiling, ArenaLayout& arena);
// For tensors that were laid out for a memory of their own, which begins `shift` bytes after the
// arena (or before it).
void PlaceOutside(CallLayout& layout, int64_t shift);
// What the problem itself holds: slopes, sink logits, sequences. After the tensors of all calls, so
// that one copy brings the small things of a launch.
void LayOutConstants(CallLayout& layout, ArenaLayout& arena);

// Float16: the call itself. Bfloat16: its (batch entry or sequence, KV head) pairs, exponents 0;
// where a bias gradient sums over entries or heads, the call itself again, with common exponents.
std::vector<Part> PartsOf(const Problem& problem, int call);

// What the sequences' region holds: one for each batch entry or sequence of the call, as the
// kernels of PartsOf read them.
std::vector<SequenceDesc> SequencesOf(const Problem& problem);

// `arena` is the arena's device address.
ProblemDesc Describe(const CallLayout& layout, const Part& part, uint64_t arena);

// Tiles of rows of every (part, batch entry, query head), most visible keys first.
std::vector<TileWork> ForwardTiles(absl::Span<const Problem* const> problems,
                                   absl::Span<const Part> parts, int q_rows);
// Tiles of keys of every (part, batch entry, KV head), most visiting rows first.
std::vector<TileWork> BackwardTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts, int kv_rows);
// Every (part, batch entry, query head).
std::vector<TileWork> HeadTiles(absl::Span<const Problem* const> problems,
                                absl::Span<const Part> parts);
// 16×16 numbers of every wanted bias gradient; those of a part of a call are the part's own.
std::vector<TileWork> BiasTiles(absl::Span<const Problem* const> problems,
                                absl::Span<const Part> parts);
// 64 rows of every head of O and V of the parts whose call keeps rows (CallLayout).
std::vector<TileWork> KeepRowsTiles(absl::Span<const CallLayout> layouts,
                                    absl::Span<const Part> parts);
// Every line of every (batch entry, head) of every bool mask, in the part that it begins.
std::vector<TileWork> MaskLineTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts, const MaskTiling& tiling);
int64_t MaskLineCount(const Problem& problem, const MaskTiling& tiling);
// 64 rows of every (part, batch entry, query head): what the Delta and dQ kernels visit.
std::vector<TileWork> RowBlockTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts);

}  // namespace attnd::cuda
