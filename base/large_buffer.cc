#include "base/large_buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/round_up.h"

namespace attnd {
namespace {

// Null where there is no memory.
void* Map(size_t bytes) {
  void* pages =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

}  // namespace

void LargeBuffer::Free::operator()(std::byte* memory) const {
  if (mapped == 0) return std::free(memory);
  munmap(memory, mapped);
}

absl::StatusOr<LargeBuffer> LargeBuffer::Make(int64_t bytes) {
  const auto size = static_cast<size_t>(RoundUp(std::max<int64_t>(bytes, 1), kAlignment));
  const size_t mapped = bytes >= kMappedFrom ? size : 0;
  void* memory = mapped > 0 ? Map(mapped) : std::aligned_alloc(kAlignment, size);
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("memory: the machine has no ", bytes, " bytes"));
  }
  std::memset(memory, 0, size);
  return LargeBuffer({static_cast<std::byte*>(memory), Free{mapped}});
}

}  // namespace attnd
