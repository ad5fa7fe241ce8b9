// The lists of a mask that lie outside of it, in the payload mask_data: how large that is, and one
// list after the other. Errors: INVALID_ARGUMENT "problem.mask.pattern[0].blocks.indices: expected
// ..., got ...". Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

inline constexpr int64_t kMaxInlineMaskNumbers = int64_t{1} << 20;  // in all lists' `value`s
inline constexpr int64_t kMaskDataAlignment = 64;

// The bytes that the lists of `wire` take in mask_data, 0 where all of them lie inside it; a size
// beyond all limits counts as 2^60. Checks that each list is given in one way, and that what
// stands inside is not too much. Reads no list.
absl::StatusOr<int64_t> MaskDataBytes(const v1::MaskSpec& wire);

// Numbers of `width` bytes each, 1, 2 or 4.
std::vector<uint32_t> NumbersOf(absl::string_view bytes, size_t width);

// The lists in `data`, whose size is that of MaskDataBytes, in the order of the fields.
class MaskDataReader {
 public:
  explicit MaskDataReader(absl::string_view data) : data_(data) {}
  absl::string_view Next(uint64_t bytes);

 private:
  const absl::string_view data_;
  int64_t at_ = 0;
};

// The other way.
class MaskDataWriter {
 public:
  // Appends a list, from the next multiple of 64 on.
  void Add(absl::string_view bytes);
  std::string Take() { return std::move(data_); }

 private:
  std::string data_;
};

}  // namespace attnd
