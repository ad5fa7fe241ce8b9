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
  // The factors of each role: of its raw products, and before them of its sums.
  alignas(16) float scales[2][2];
};

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
  float value[kVectorPasses];         // of one row: stabiliser, delta or factor of dQ
  int next_gain = kNoGain, gain = 0;  // of its tile of rows; of the last step that had one
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
    if (work.thread < kVectors * kStepRows) FetchGain(work, here.row);
    if (at.template Advance<kStepRows>(work.visits, here)) {
      OpenHead(work, at.template Head<kStepRows>(work.visits));
    }
  }
  ATTN_HD void FetchRow(const Work& work, int first_row, int pass) {
    const int row = first_row + work.thread % kStepRows;
    ptx::LoadConstantFloatIf(value[pass], ptx::Offset(from_rows[pass], row, 4), row < limit);
  }
  ATTN_HD void FetchGain(const Work& work, int row) {
    const bool exists = row < limit;
    const int head = exists ? at.template Head<kStepRows>(work.visits) : 0;
    uint32_t word = kNoGain;
    ptx::LoadConstant32If(word, GainsOfHead(work.problem, work.batch, head) + row / kDqBlockRows,
                          exists);
    next_gain = static_cast<int>(word);
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
    if (work.thread < kVectors * kStepRows) PutScales(work, slot, shared);
#pragma unroll
    for (int n = 0; n < kVectorPasses; ++n) {
      if (work.thread + n * kThreads < kVectors * kStepRows) PutRow(work, slot, step, n, shared);
    }
  }
  // A tile whose dS is 0 has the gain before it.
  ATTN_HD void PutScales(const Work& work, int slot, Shared& shared) {
    const int before = gain;
    if (next_gain != kNoGain) gain = next_gain;
    if (work.thread != kStepRows) return;
    const float of_sums = PowerOfTwo(MaxInt(gain - before, -126));
    ptx::StoreShared128(
        Kernel::At(shared.slots, slot + Kernel::kScalesAt),
        make_uint4(ptx::FloatBits(Kernel::ScoreMultiplier(work.problem)), ptx::FloatBits(1.0f),
                   ptx::FloatBits(Kernel::GradientMultiplier(work.problem) * PowerOfTwo(gain)),
                   ptx::FloatBits(of_sums)));
    ptx::StoreShared32(&shared.exponent, static_cast<uint32_t>(gain));
  }
  ATTN_HD void PutRow(const Work& work, int slot, int step, int pass, Shared& shared) const {
    char* rows = Kernel::At(shared.slots, slot + Kernel::kPairBytes);
    const int at_thread = work.thread + pass * kThreads;
    if (at_thread < 2 * kStepRows) {
      const int exponent = at_thread < kStepRows ? 0 : gain - Kernel::kShiftOfP;
      ptx::StoreSharedFloat(rows + at_thread * 4, value[pass] * PowerOfTwo(exponent));
    } else {
      Kernel::PutFactor(shared, step, at_thread - 2 * kStepRows,
                        FixedPoint::RowFactor(value[pass], PowerOfTwo(-gain)));
    }
  }
};

}  // namespace attnd::sm70
