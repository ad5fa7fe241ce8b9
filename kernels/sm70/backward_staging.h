// backward_staging.h brings a backward block's inputs of each step: all threads bring the rows of Q
// and dO, some of them each row's stabiliser, delta and factor of dQ. Fetch runs a step ahead of
// Put. A piece of backward.h's schedule. Errors: none.
#pragma once

#include "kernels/sm70/backward_passes.h"
#include "kernels/sm70/pipeline.h"

namespace attnd::sm70 {

// A step in shared memory.
template <int kPairBytes, int kStepRows>
struct alignas(128) StepSlot {
  uint4 tiles[kPairBytes / 16];  // Q, then dO
  float rows[2][kStepRows];      // stabiliser of P, then delta·gain
};

// Gains (rules/gradient_scale.h): where the tiles of a KV head share one, as nearly always, the
// loop does nothing about them. Where they differ, the first step of each tile (a round) looks its
// gain up before it is fetched, and leaves it in shared memory for the second role, which turns to
// it two steps later.
inline constexpr int kKeptGains = 4;

// The gain of the tile of rows that a step is in. kNoGain where there is no step either.
template <class Kernel>
ATTN_HD int GainOfStep(const typename Kernel::Work& work, const typename Kernel::Cursor& at) {
  const ProblemDesc& p = work.problem;
  const int row = at.template Read<Kernel::kStepRows>(work.visits).row;
  const int head = at.template Head<Kernel::kStepRows>(work.visits);
  if (row >= work.sequence.q_len || head >= work.visits.first_head() + p.group) return kNoGain;
  return GainOfTile(p, work.batch, head, row / kDqBlockRows);
}
// The gain of the last step that the second role worked on.
template <class Kernel>
ATTN_HD int GainOfSums(const typename Kernel::Work& work) {
  return FloatExponent(work.multiplier) - FloatExponent(Kernel::GradientMultiplier(work.problem));
}
// The second role turns to the n-th step. Returns by what it has to multiply its sums.
template <class Kernel>
ATTN_HD float TakeGain(typename Kernel::Work& work, int step,
                       const typename Kernel::Shared& shared) {
  if (step % Kernel::kRoundSteps != 0) return 1;
  const int gain =
      static_cast<int>(ptx::LoadShared32(&shared.gains[step / Kernel::kRoundSteps % kKeptGains]));
  const int before = GainOfSums<Kernel>(work);
  if (gain == kNoGain) return 1;  // a tile whose dS is 0 has the gain before it
  work.multiplier = Kernel::GradientMultiplier(work.problem) * PowerOfTwo(gain);
  return PowerOfTwo(MinInt(MaxInt(gain - before, -126), 126));
}

template <class Kernel>
struct StepStager {
  using Work = typename Kernel::Work;
  using Shared = typename Kernel::Shared;
  static constexpr int kThreads = Kernel::kThreads, kStepRows = Kernel::kStepRows;
  static constexpr int kChunks = Kernel::kRowChunks, kRowBytes = Kernel::kRowBytes;
  static constexpr bool kKeepsPitches = Kernel::kKeepsPitches;
  static constexpr int kRowsAPass = kThreads / kChunks, kPasses = kStepRows / kRowsAPass;
  static constexpr int kVectors = Kernel::kVectors, kVectorPasses = Kernel::kVectorPasses;
  uint4 q[kPasses], d_o[kPasses];
  float value[kVectorPasses];     // of one row: stabiliser, delta or factor of dQ
  float row_gain[kVectorPasses];  // by which it is multiplied
  const char *from_q, *from_o, *from_rows[kVectorPasses];
  int place;                    // of this thread's chunk in a tile
  int q_pitch, o_pitch;         // bytes from row to row; 0: looked up
  int limit, q_limit, o_limit;  // rows that exist, and those that this thread may read
  typename Kernel::Cursor at;
  typename Kernel::FetchPlace place_of_fetch;

  ATTN_HD explicit StepStager(const Work& work)
      : place(ptx::Keep(
            ChunkOffset(Kernel::RowOfThread(work.thread), work.thread % kChunks, Kernel::kChunks))),
        q_pitch(kKeepsPitches ? ptx::Keep(PitchOf(work.problem.q)) : 0),
        o_pitch(kKeepsPitches ? ptx::Keep(PitchOf(work.problem.d_o)) : 0),
        at(work.visits) {
    Clear(work);
    OpenHead(work, at.template Head<kStepRows>(work.visits));
    SetRowGains(work, work.gains.lowest);
  }
  ATTN_HD static int PitchOf(const RowTensor& t) { return static_cast<int>(t.row_stride * 2); }
  ATTN_HD void Clear(const Work& work) {
#pragma unroll
    for (int n = 0; n < kPasses; ++n) q[n] = d_o[n] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int n = 0; n < kVectorPasses; ++n) {
      value[n] = work.thread + n * kThreads < kStepRows ? Infinity() : 0.0f;
    }
  }
  // Beyond the last head nothing is read.
  ATTN_HD void OpenHead(const Work& work, int next_head) {
    const ProblemDesc& p = work.problem;
    const SequenceDesc& s = work.sequence;
    const int chunk = work.thread % kChunks;
    const bool exists = next_head < work.visits.first_head() + p.group;
    const int head = exists ? next_head : 0;
    limit = exists ? s.q_len : 0;
    q_limit = chunk < p.qk_chunks ? limit : 0;
    o_limit = chunk < p.v_chunks ? limit : 0;
    from_q = RowOf(p.q, s.batch, head, s.q_begin) + chunk * 16;
    from_o = RowOf(p.d_o, s.batch, head, s.q_begin) + chunk * 16;
#pragma unroll
    for (int n = 0; n < kVectorPasses; ++n) {
      const int at_thread = work.thread + n * kThreads;
      const float* vector = at_thread < kStepRows       ? p.stabilizer
                            : at_thread < 2 * kStepRows ? p.delta
                                                        : p.dq_factor;
      from_rows[n] = reinterpret_cast<const char*>(vector + s.batch * p.lse_batch +
                                                   head * p.lse_head + s.q_begin);
    }
  }
  // Fetches the n-th step ahead of the loop.
  ATTN_HD void FetchFirst(const Work& work, int step, Shared& shared) {
    if (work.gains.differ) TakeGain(work, step, shared);
    Fetch(work);
  }
  // Ahead of Fetch.
  ATTN_HD void Bring(const Work& work) { place_of_fetch.Bring(work.visits, at); }
  ATTN_HD void Fetch(const Work& work) {
    const ProblemDesc& p = work.problem;
    const auto here = place_of_fetch.Read(work.visits, at);
    // Rows beyond the sequence become zero, with P = 0.
    if (ptx::VoteAny(here.row + kStepRows > limit)) {
      ptx::SyncWarp();  // keeps this a branch
      Clear(work);
    }
    const int row = here.row + Kernel::RowOfThread(work.thread);
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const int from = row + n * kRowsAPass;
      ptx::LoadConstant128If(
          q[n], ptx::Offset(from_q, from, kKeepsPitches ? q_pitch : PitchOf(p.q)), from < q_limit);
      ptx::LoadConstant128If(d_o[n],
                             ptx::Offset(from_o, from, kKeepsPitches ? o_pitch : PitchOf(p.d_o)),
                             from < o_limit);
    }
#pragma unroll
    for (int n = 0; n < kVectorPasses; ++n) {
      if (work.thread + n * kThreads < kVectors * kStepRows) FetchRow(work, here.row, n);
    }
    if (at.template Advance<kStepRows>(work.visits, here)) {
      OpenHead(work, at.template Head<kStepRows>(work.visits));
    }
  }
  ATTN_HD void FetchRow(const Work& work, int first_row, int pass) {
    const int row = first_row + work.thread % kStepRows;
    ptx::LoadConstantFloatIf(value[pass], ptx::Offset(from_rows[pass], row, 4), row < limit);
  }
  ATTN_HD void SetRowGains(const Work& work, int gain) {
#pragma unroll
    for (int n = 0; n < kVectorPasses; ++n) {
      const int at_thread = work.thread + n * kThreads;
      row_gain[n] = PowerOfTwo(at_thread < kStepRows       ? 0
                               : at_thread < 2 * kStepRows ? gain - Kernel::kShiftOfP
                                                           : -gain);
    }
  }
  // Where gains differ, ahead of Fetch of the n-th step, but after Put of the one before it.
  ATTN_HD void TakeGain(const Work& work, int step, Shared& shared) {
    if (step % Kernel::kRoundSteps != 0) return;
    const int gain = GainOfStep<Kernel>(work, at);
    if (work.thread == 0) {
      ptx::StoreShared32(&shared.gains[step / Kernel::kRoundSteps % kKeptGains],
                         static_cast<uint32_t>(gain));
    }
    if (gain != kNoGain) SetRowGains(work, gain);
  }
  // The n-th step; its factors stay until later steps' take their place (Kernel::PutFactor).
  ATTN_HD void Put(const Work& work, int slot, int step, Shared& shared) {
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const int twist = Twist(n * kRowsAPass) * 16;
      const int to = place ^ twist, rows = n * kRowsAPass * kRowBytes;
      ptx::StoreShared128(Kernel::At(shared.slots, slot + to + rows), q[n]);
      ptx::StoreShared128(Kernel::At(shared.slots, slot + Kernel::Second(to, kStepRows) + rows),
                          d_o[n]);
    }
#pragma unroll
    for (int n = 0; n < kVectorPasses; ++n) {
      if (work.thread + n * kThreads < kVectors * kStepRows) PutRow(work, slot, step, n, shared);
    }
  }
  ATTN_HD void PutRow(const Work& work, int slot, int step, int pass, Shared& shared) const {
    char* rows = Kernel::At(shared.slots, slot + Kernel::kPairBytes);
    const int at_thread = work.thread + pass * kThreads;
    if (at_thread < 2 * kStepRows) {
      ptx::StoreSharedFloat(rows + at_thread * 4, value[pass] * row_gain[pass]);
    } else {
      Kernel::PutFactor(shared, step, at_thread - 2 * kStepRows,
                        FixedPoint::RowFactor(value[pass], row_gain[pass]));
    }
  }
};

}  // namespace attnd::sm70
