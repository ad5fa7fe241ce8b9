#include "client/modules/kept_bytes.h"

#include <cstring>
#include <utility>

#include "base/non_temporal_copy.h"
#include "client/call/shared_tensors.h"

namespace attnd {
namespace {

std::shared_ptr<std::byte> OnHeap(size_t size) {
  return std::shared_ptr<std::byte>(new std::byte[size], std::default_delete<std::byte[]>());
}

}  // namespace

KeptBytes KeptBytes::Copy(absl::Span<const std::byte> bytes, SharedMemory* shared) {
  if (bytes.empty()) return KeptBytes();
  std::shared_ptr<std::byte> copy;
  const auto size = static_cast<int64_t>(bytes.size());
  if (shared != nullptr && size >= SharedTensors::kFewBytes) copy = shared->Allocate(size);
  if (copy == nullptr) copy = OnHeap(bytes.size());
  CopyNonTemporal(copy.get(), bytes.data(), bytes.size());  // other cores read it
  return KeptBytes(std::move(copy), bytes.size());
}

KeptBytes KeptBytes::Zeros(size_t size) {
  std::shared_ptr<std::byte> zeros = OnHeap(size);
  std::memset(zeros.get(), 0, size);
  return KeptBytes(std::move(zeros), size);
}

}  // namespace attnd
