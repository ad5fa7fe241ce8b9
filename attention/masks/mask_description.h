// MaskDescription: a mask that has been checked, in its canonical form, with its id. Immutable; any
// thread. A cache holds one object per id, so that equal masks are equal pointers.
//
// Canonical form. Spellings that differ only in what cannot matter become one: patterns that no
// head uses, their order, duplicates; nested all_of and any_of, their order, negations above them,
// operands that change nothing; windows that overlap; values beyond every row and key; runs that
// are empty or touch; bitmaps sent twice, full or empty ones. It holds the same set as the spelling
// it was made from, for every origin, offset and size that the extents allow. Other spellings of
// one set may stay different: that costs an entry of a cache and never a result.
//
// id = SHA-256("attnd.mask/1\0" ‖ encoding): equal ids are equal masks. The encoding is
// its own (mask_encoding.h), not the wire's: tag, length, little-endian fields in order, lists in
// the narrowest entries of 1, 2 or 4 bytes. Extents count as `batch` and `q_heads` only where the
// mask depends on their number, and then as 0 otherwise. The origin is no part of it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

using MaskId = std::array<uint8_t, 32>;

// OK, or the first thing that is wrong, by the wire's name:
//   InvalidArgument "problem.mask.pattern[3].expr.window.left: expected -1 or above, got -7"
// Reads each entry once and allocates by the number of patterns only.
absl::Status ValidateMask(const MaskSpec& spec, const MaskCall& call);

// The extents with those that are 0 filled in: the problem's rows and keys; and as many batch
// entries and heads as reach from the origin to the problem's end.
MaskExtents ResolvedExtents(const MaskSpec& spec, const MaskCall& call);

// Whether a call with these sizes and this place lies inside the mask (already canonical). Errors
// as above, of problem.mask.origin and problem.mask.extents.
absl::Status ValidatePlace(const MaskSpec& canonical, const MaskOrigin& origin,
                           const MaskCall& call);

class MaskDescription {
 public:
  // Checks `spec`, resolves its extents by `call`, brings it into canonical form. The origin of
  // `spec` is checked and dropped: it belongs to the call. Errors: ValidateMask's.
  static absl::StatusOr<std::shared_ptr<const MaskDescription>> Make(const MaskSpec& spec,
                                                                     const MaskCall& call);

  // Canonical; extents.rows and keys are there, batch and q_heads are 0 where any number will do.
  const MaskSpec& spec() const { return spec_; }
  const MaskId& id() const { return id_; }
  int64_t bytes() const { return bytes_; }  // that this object takes
  // Whether any head's pattern counts query positions: then a call whose lengths differ has to say
  // where the diagonal lies, as for causal.
  bool depends_on_diagonal() const { return depends_on_diagonal_; }

 private:
  explicit MaskDescription(MaskSpec canonical);

  MaskSpec spec_;
  MaskId id_;
  int64_t bytes_;
  bool depends_on_diagonal_;
};

// The canonical form of a valid spec whose extents have rows and keys. The origin is dropped.
// Canonical of a canonical mask is the same.
MaskSpec CanonicalMask(const MaskSpec& spec);

}  // namespace attnd
