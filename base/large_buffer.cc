#include "base/large_buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/round_up.h"

namespace attnd {
namespace {

std::atomic<int64_t> all_mapped = 0;

// Null where there is no memory.
void* Map(size_t bytes) {
  void* pages =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  if (pages == MAP_FAILED) return nullptr;
  all_mapped += static_cast<int64_t>(bytes);
  return pages;
}

}  // namespace

void LargeBuffer::Free::operator()(std::byte* memory) const {
  if (mapped == 0) return std::free(memory);
  munmap(memory, mapped);
  all_mapped -= static_cast<int64_t>(mapped);
}

int64_t LargeBuffer::MappedBytes() { return all_mapped; }

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
