#include "base/non_temporal_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace attnd {

void CopyNonTemporal(std::byte* to, const std::byte* from, size_t size) {
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

}  // namespace attnd
