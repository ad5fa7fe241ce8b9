#include "base/non_temporal_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "base/cpu_quota.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace attnd {
namespace {

// One core copied 7 GB/s on a host whose memory gives several times that.
constexpr size_t kPartBytes = size_t{4} << 20;
constexpr size_t kMostParts = 4;

void CopyPart(std::byte* to, const std::byte* from, size_t size) {
#if defined(__SSE2__)
  size_t head = std::min(size, -reinterpret_cast<uintptr_t>(to) % 16);
  std::memcpy(to, from, head);
  size_t done = head;
  for (; done + 64 <= size; done += 64) {
    const auto* in = reinterpret_cast<const __m128i*>(from + done);
    auto* out = reinterpret_cast<__m128i*>(to + done);
    __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(to + done, from + done, size - done);
  _mm_sfence();  // the copy is visible to other threads before this returns
#else
  std::memcpy(to, from, size);
#endif
}

}  // namespace

void CopyNonTemporal(std::byte* to, const std::byte* from, size_t size) {
  if (size < 2 * kPartBytes) return CopyPart(to, from, size);
  static const auto most_parts = std::min(kMostParts, static_cast<size_t>(AvailableCpus()));
  const size_t parts = std::min(size / kPartBytes, most_parts);
  const size_t part = size / parts;
  std::vector<std::thread> threads;
  size_t rest = size;  // the first bytes, which this thread copies
  try {
    while (threads.size() + 1 < parts) {
      threads.emplace_back(&CopyPart, to + rest - part, from + rest - part, part);
      rest -= part;
    }
  } catch (const std::system_error&) {  // no more threads are to be had
  }
  CopyPart(to, from, rest);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace attnd
