// A packed cubin, as an archive holds it inside the program and in the disk cache: its size (8
// bytes, little endian), then a zlib stream, whose checksum tells a damaged one. Machine code
// shrinks to three tenths; Unpack takes about half a millisecond, once for each kernel that is
// loaded. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

struct Cubin {
  // The driver is given this: 8-byte aligned, zero after `size`.
  std::vector<uint64_t> image;
  size_t size = 0;  // bytes

  absl::string_view bytes() const { return {reinterpret_cast<const char*>(image.data()), size}; }
};

std::string PackCubin(absl::string_view cubin);
// DATA_LOSS for what PackCubin does not write.
absl::StatusOr<Cubin> UnpackCubin(absl::string_view packed);

}  // namespace attnd
