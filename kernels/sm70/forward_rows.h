// forward_rows.h brings the tensor that a role of small tiles multiplies: its one warp takes rows
// of K (scores) or V (output) through its own part of shared memory, and waits for no other. Groups
// have 16 keys: a step's two are in shared memory, the next is under way in registers. `L`:
// ForwardLayout. Errors: none.
#pragma once

#include "kernels/sm70/forward_layout.h"

namespace attnd::sm70 {

template <class L, bool kValues, bool kOwnTiles = L::kOwnTiles>
class OwnRows;

template <class L, bool kValues>
class OwnRows<L, kValues, false> {
 public:
  ATTN_HD explicit OwnRows(const typename L::Work&) {}
};

template <class L, bool kValues>
class OwnRows<L, kValues, true> {
 public:
  using Work = typename L::Work;
  using Shared = typename L::Shared;

  ATTN_HD explicit OwnRows(const Work& work)
      : rows_(RowOf(Tensor(work), work.at.sequence.batch, work.at.head / work.at.problem.group,
                    work.at.sequence.kv_begin),
              static_cast<int>(Tensor(work).row_stride * 2), work.at.sequence.kv_len,
              kValues ? work.at.problem.v_chunks : work.at.problem.qk_chunks, work.thread) {}

  // The first step's.
  ATTN_HD void Open(const Work& work, Shared& shared) {
    Group second = rows_;
    rows_.Fetch(FirstKey(work, 0));
    second.Fetch(FirstKey(work, 1));
    Put(rows_, work, 0, shared);
    Put(second, work, 1, shared);
    if (work.tiles.count() > 1) rows_.Fetch(FirstKey(work, 2));
  }
  // Group `group` has been read by the whole warp: its place is the next step's.
  ATTN_HD void Advance(const Work& work, int group, Shared& shared) {
    ptx::SyncWarp();
    const int next = group + 2, count = 2 * work.tiles.count();
    if (next < count) Put(rows_, work, next, shared);
    if (next + 1 < count) rows_.Fetch(FirstKey(work, next + 1));
  }

 private:
  using Group = RowStager<L::kChunks, kWarpLanes, L::kPitch, kValues ? L::kValueChunk : 0>;

  ATTN_HD static const RowTensor& Tensor(const Work& work) {
    return kValues ? work.at.problem.v : work.at.problem.k;
  }
  ATTN_HD static int FirstKey(const Work& work, int group) {
    return work.tiles.At(group >> 1).First() + (group & 1) * L::kGroupKeys;
  }
  ATTN_HD static void Put(const Group& rows, const Work& work, int group, Shared& shared) {
    const int offset = (group & 1) * L::kGroupBytes;
    if constexpr (kValues) {
      if (work.tiles.At(group >> 1).IsPartial()) {
        if (rows.template PutFinite<true>(shared.v(), offset, 0, FirstKey(work, group))) {
          ptx::StoreShared32(&shared.left_out, 1);
        }
        return;
      }
    }
    rows.Put(kValues ? shared.v() : shared.k, offset);
  }

  Group rows_;
};

}  // namespace attnd::sm70
