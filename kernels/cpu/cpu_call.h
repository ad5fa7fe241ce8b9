// CpuCall: a call, and how the CPU engine goes through its mask. RowClass: the rows and keys that
// one of its items works on.
#pragma once

#include <cstdint>
#include <optional>

#include "attention/residue_classes.h"
#include "attention/tensor_view.h"
#include "kernels/backend.h"

namespace attnd {

template <class Call>
struct CpuCall : Call {
  // Set: items are of classes, the problem's windows are theirs, and it has no mask.
  std::optional<ResidueClasses> residues;
};
using CpuForwardCall = CpuCall<ForwardCall>;
using CpuBackwardCall = CpuCall<BackwardCall>;

// A sequence; or of one with residue classes, the rows of one residue and the keys that they see.
struct RowClass {
  Sequence sequence;     // q_begin and kv_begin count rows of the tensors, all else those of here
  int64_t step = 1;      // from a row or key to the next, in rows of the tensors
  int64_t all_keys = 0;  // that exist in the whole sequence

  int64_t QueryRow(int64_t row) const { return sequence.q_begin + row * step; }
  int64_t KeyRow(int64_t key) const { return sequence.kv_begin + key * step; }
  TensorStrides Stepping(TensorStrides strides) const {
    strides.row *= step;
    return strides;
  }
  int64_t LseIndex(const Problem& p, int64_t b, int64_t h, int64_t row) const {
    return ((IsPacked(p.layout) ? 0 : b * p.q_heads) + h) * p.q_len + QueryRow(row);
  }
};

template <class Call>
int64_t RowClasses(const CpuCall<Call>& call, const Sequence& whole) {
  return call.residues ? call.residues->Count(whole) : 1;
}

template <class Call>
RowClass RowClassOf(const CpuCall<Call>& call, int64_t batch_index, int64_t residue) {
  const Sequence whole = call.problem->SequenceAt(batch_index);
  if (!call.residues) return {whole, 1, whole.kv_len};
  return {call.residues->ClassAt(whole, residue), call.residues->p, whole.kv_len};
}

}  // namespace attnd
