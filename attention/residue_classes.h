// ResidueClasses: a problem under a strided or dilated mask as problems without one. Row i sees
// only keys j with (i + offset − j) mod p = phase, so the rows of one residue c,
//     i = c + p·r        meet the keys        j = c' + p·t,   c' = (c + offset − phase) mod p
// and on (r, t) what causal, window and the mask leave is a window around a diagonal of the class.
// A class is every p-th row of the same tensors: nothing is gathered. (SPLAT's alignment, as a
// view.) Values; any thread.
//
// Order of sums: a row adds up its keys in ascending order, in tiles of its class.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "attention/masks/residue_form.h"
#include "attention/problem.h"

namespace attnd {

struct ResidueClasses {
  int64_t p = 0, phase = 0;
  // Every class has this window, as Problem's, around its diagonal; causal is window_right = 0.
  int64_t window_left = -1, window_right = -1;
  int64_t shift = 0;  // of every class's diagonal

  // Those that have rows: residues 0 .. Count − 1. At least 1.
  int64_t Count(const Sequence& whole) const;
  // Where q_begin and kv_begin count rows of the tensors, and lengths and offset those of the
  // class: its row r is row q_begin + p·r of the tensor. Without a row or a key of the residue the
  // class is empty.
  Sequence ClassAt(const Sequence& whole, int64_t residue) const;
  // The residue of the rows that may see key `key` of the sequence.
  int64_t ResidueOfKey(const Sequence& whole, int64_t key) const;
};

// Cuts a valid problem with a mask into classes. UNIMPLEMENTED names the field that keeps it from
// being cut: a mask of another form; dropout, whose bits are drawn for blocks of 16 × 32 scores;
// bias, a bool mask, ALiBi, which would be read in strides; and what leaves no key to any row.
absl::StatusOr<ResidueClasses> ResidueClassesOf(const Problem& problem);

}  // namespace attnd
