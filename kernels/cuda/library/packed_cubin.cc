#include "kernels/cuda/library/packed_cubin.h"

#include <zlib.h>

#include <cstring>

#include "base/check.h"

namespace attnd {
namespace {

constexpr uint64_t kMostShrunk = 1032;  // zlib's limit: a stream of n bytes holds at most 1032·n

absl::Status DamagedCubin() { return absl::DataLossError("kernel archive: a cubin is damaged"); }

}  // namespace

std::string PackCubin(absl::string_view cubin) {
  const uint64_t size = cubin.size();
  uLongf bytes = compressBound(size);
  std::string packed(sizeof(size) + bytes, '\0');
  std::memcpy(packed.data(), &size, sizeof(size));
  const int result =
      compress2(reinterpret_cast<Bytef*>(packed.data() + sizeof(size)), &bytes,
                reinterpret_cast<const Bytef*>(cubin.data()), size, Z_BEST_COMPRESSION);
  CHECK(result == Z_OK) << result;
  packed.resize(sizeof(size) + bytes);
  return packed;
}

absl::StatusOr<Cubin> UnpackCubin(absl::string_view packed) {
  uint64_t size = 0;
  if (packed.size() < sizeof(size)) return DamagedCubin();
  std::memcpy(&size, packed.data(), sizeof(size));
  packed.remove_prefix(sizeof(size));
  if (size == 0 || size / kMostShrunk > packed.size()) return DamagedCubin();
  Cubin cubin{std::vector<uint64_t>((size + 7) / 8), size};
  uLongf written = size, read = packed.size();
  const int result = uncompress2(reinterpret_cast<Bytef*>(cubin.image.data()), &written,
                                 reinterpret_cast<const Bytef*>(packed.data()), &read);
  if (result != Z_OK || written != size || read != packed.size()) return DamagedCubin();
  return cubin;
}

}  // namespace attnd
