// KernelArchive: compiled kernels of one target in one file: a text index, one line an entry, a
// line "end", then the cubins. Made at build time by compile_cubins and embedded; the same format
// holds what is compiled at run time, in the disk cache; both hold their cubins packed
// (packed_cubin.h).
//
//     attnd kernels 1 sm_70
//     forward_d64_f32_linear _ZN5attnd…  0 51234 256 45056 128 0
//     end
//
// Parse answers INVALID_ARGUMENT for anything else (a cache file may be damaged). Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

struct ArchivedKernel {
  std::string name;          // NameOf(row)
  std::string entry;         // the lowered name in the cubin
  absl::string_view cubin;   // into the archive's bytes
  int threads = 0;           // per block
  int64_t shared_bytes = 0;  // dynamic
  int registers = 0;
  int spill_bytes = 0;
};

struct KernelArchive {
  std::string target;  // "sm_70"
  std::vector<ArchivedKernel> kernels;

  const ArchivedKernel* Find(absl::string_view name) const;  // null: none
};

// The kernels' cubins point into `bytes`, which outlives the archive.
absl::StatusOr<KernelArchive> ParseKernelArchive(absl::string_view bytes);
std::string FormatKernelArchive(const KernelArchive& archive);

}  // namespace attnd
