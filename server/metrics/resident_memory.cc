#include "server/metrics/resident_memory.h"

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "base/large_buffer.h"
#include "base/read_file.h"

namespace attnd {
namespace {

// Pages asked for at a time.
constexpr size_t kPages = 1 << 16;

// Counts the resident bytes of a range that begins at a page.
int64_t BytesThere(absl::Span<std::byte> memory) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> there(kPages);
  int64_t pages = 0;
  while (!memory.empty()) {
    const absl::Span<std::byte> part = memory.first(std::min(memory.size(), kPages * page));
    if (mincore(part.data(), part.size(), there.data()) != 0) return 0;
    for (size_t n = 0; n * page < part.size(); ++n) pages += there[n] & 1;
    memory.remove_prefix(part.size());
  }
  return pages * static_cast<int64_t>(page);
}

// "RssAnon:     1234 kB" of /proc/self/status.
int64_t StatusBytes(absl::string_view field) {
  const std::string text = ReadFile("/proc/self/status");
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StartsWith(line, field)) continue;
    const std::vector<absl::string_view> words =
        absl::StrSplit(line.substr(field.size()), absl::ByAnyChar(" \t:"), absl::SkipEmpty());
    int64_t kib = 0;
    return !words.empty() && absl::SimpleAtoi(words[0], &kib) ? kib << 10 : 0;
  }
  return 0;
}

int64_t HeapBytes() {
  const struct mallinfo2 heap = mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
}

}  // namespace

void AddResidentBytes(absl::Span<std::byte> staging, SampledMetrics& metrics) {
  const auto add = [&](const char* kind, auto value) {
    metrics.AddGauge("attnd_resident_bytes", {{"kind", kind}},
                     [value] { return static_cast<double>(value()); });
  };
  add("staging", [staging] { return BytesThere(staging); });
  add("tensors", [] { return LargeBuffer::MappedBytes(); });
  add("heap", [] { return HeapBytes(); });
  add("program", [] { return StatusBytes("RssFile"); });
  add("shared", [] { return StatusBytes("RssShmem"); });
  add("other", [staging] {
    const int64_t told = BytesThere(staging) + LargeBuffer::MappedBytes() + HeapBytes();
    return std::max<int64_t>(0, StatusBytes("RssAnon") - told);
  });
}

}  // namespace attnd
