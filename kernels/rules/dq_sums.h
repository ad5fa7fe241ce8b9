// Adding a backward block's share of dQ to the workspace in lane order (`Dq`: where a lane's sums
// lie, rules/backward_passes.h), and what is slow and rare about it: second integers, sums that are
// not finite, infinities and NaN of K that were left out of the product. Errors: none.
#pragma once

#include "kernels/rules/backward_passes.h"
#include "kernels/rules/half_element.h"

namespace attnd {

template <class Dq, class Element, class Rule, class DqSums>
struct DqAdder {
  // The block's keys and this thread, whose part of dQ is added.
  const ProblemDesc& problem;
  const SequenceDesc& sequence;
  int batch, warp, lane;

  // This lane's first sum of the block of 64 queries that starts with `row`.
  ATTN_HD float* Sums(int head, int row) const {
    return problem.dq_sums + (int64_t{batch} * problem.q_heads + head) * problem.dq_head +
           int64_t{row / kDqBlockRows} * Dq::kBlockFloats + warp * Dq::kSums * 32 + lane;
  }

  // Part `part` of the lane's sums, sum(n) for n < kSums, to Sums(head, row). `watch`: 0, or NaN
  // where sums have a second integer.
  template <class Sum>
  ATTN_HD void Add(int head, int row, int part, float watch, const Sum& sum) const {
    float* to = Sums(head, row) + part * Dq::kFloats;
    if constexpr (!DqSums::kFixedPoint) {
#pragma unroll
      for (int n = 0; n < Dq::kSums; ++n) ptx::ReduceAdd(to + n * 32, sum(n));
    } else {
      float all = watch;
#pragma unroll
      for (int n = 0; n < Dq::kSums; ++n) {
        ptx::ReduceAdd(reinterpret_cast<int32_t*>(to) + n * 32, ptx::RoundToInt(sum(n)));
        if (n % 2 == 1) all = ptx::Fma(sum(n - 1), sum(n), all);
      }
      // One rare branch for both.
      if (!(all - all == 0)) {
        if (problem.dq_rest != 0) AddRests(to, sum);
        MarkSums(head, row, part, sum);
      }
    }
  }

  // Marks sum n of the block of dQ that starts with `row` as not finite.
  ATTN_HD void Mark(int head, int row, int part, int n) const {
    if constexpr (DqSums::kFixedPoint) {
      const int column = part * Dq::kOut + Dq::Column(n, warp, lane);
      uint32_t* words =
          DqNonFinite<Dq::kColumns>(problem, batch, head, row + Dq::Query(n, warp, lane));
      ptx::ReduceOr(words + (column >> 5), 1u << (column & 31));
    } else {
      ptx::ReduceAdd(Sums(head, row) + part * Dq::kFloats + n * 32, ptx::BitsFloat(0x7fffffffu));
    }
  }

  // The same of an integer, if `condition`, without a branch.
  ATTN_HD void MarkIf(bool condition, int head, int row, int n) const {
    const int column = Dq::Column(n, warp, lane);
    uint32_t* words =
        DqNonFinite<Dq::kColumns>(problem, batch, head, row + Dq::Query(n, warp, lane));
    ptx::ReduceOrIf(words + (column >> 5), 1u << (column & 31), condition);
  }

  // A row that sees an infinite or NaN number of K has 0·∞ or NaN in that column of dQ, whatever
  // its P; NaN is NaN in any order. For all rounds of a block of `keys` keys, or one.
  template <class Visits>
  ATTN_HD void MarkNonFiniteKeys(const Visits& visits, int kv_head, int first_key, int keys) const {
#pragma unroll 1
    for (int round = 0; round < visits.rounds(); ++round) {
      MarkNonFiniteKeys(visits.HeadOf(round), visits.RowOf(round), kv_head, first_key, keys);
    }
  }
  ATTN_HD void MarkNonFiniteKeys(int head, int row, int kv_head, int first_key, int keys) const {
#pragma unroll 1
    for (int n = 0; n < Dq::kSums * Dq::kParts; ++n) {
      const int part = n / Dq::kSums, sum = n % Dq::kSums;
      const int column = part * Dq::kOut + Dq::Column(sum, warp, lane);
      const int query = row + Dq::Query(sum, warp, lane);
      if (SeesNonFinite(head, query, column, kv_head, first_key, keys)) Mark(head, row, part, sum);
    }
  }

 private:
  // Adds the rests of rounding, which are exact, since a float32 beyond 2^23 is an integer.
  template <class Sum>
  ATTN_HD void AddRests(float* sums, const Sum& sum) const {
    int32_t* to = reinterpret_cast<int32_t*>(sums) + problem.dq_rest;
    const float unit = PowerOfTwo(FixedPoint::RestBits(sequence.kv_len));
#pragma unroll
    for (int n = 0; n < Dq::kSums; ++n) {
      ptx::ReduceAdd(to + n * 32, ptx::RoundToInt((sum(n) - ptx::Round(sum(n))) * unit));
    }
  }
  template <class Sum>
  ATTN_HD void MarkSums(int head, int row, int part, const Sum& sum) const {
#pragma unroll
    for (int n = 0; n < Dq::kSums; ++n) {
      if (!(sum(n) - sum(n) == 0)) Mark(head, row, part, n);
    }
  }
  ATTN_HD bool SeesNonFinite(int head, int row, int column, int kv_head, int first_key,
                             int keys) const {
    const ScoreContext at = {problem, sequence, batch, head, Rule::OptionsOf(problem)};
    MaskLookup mask(problem.tile_lists, batch, head);
    const int end = MinInt(first_key + keys, sequence.kv_len);
    bool sees = false;
    const int place = column * Element::kBytes;  // in a row
    if ((place >> 4) >= problem.qk_chunks) return false;
#pragma unroll 1
    for (int key = first_key; key < end; ++key) {
      const char* from =
          RowOf(problem.k, sequence.batch, kv_head, int64_t{sequence.kv_begin} + key);
      const uint32_t word = Element::WordOf(from, place >> 2);
      if (Element::NonFinite(word) & (place & 2 ? 0xffff0000u : 0xffffu)) {
        sees |= Rule::IsVisible(at, mask, row, key);
      }
    }
    return sees;
  }
};

}  // namespace attnd
