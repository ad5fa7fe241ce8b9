#include "base/non_temporal_copy.h"

#include <algorithm>
#include <atomic>
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
constexpr size_t kPartBytes = size_t{1} << 20;
constexpr int kMostThreads = 8;

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

void CopyNonTemporal(std::byte* to, const std::byte* from, size_t size, int most_threads) {
  if (size < 2 * kPartBytes) return CopyPart(to, from, size);
  static const int usual_threads = std::clamp(AvailableCpus() / 2, 1, kMostThreads);
  const auto most = static_cast<size_t>(most_threads > 0 ? most_threads : usual_threads);
  // Each takes the next part, so that a thread that begins late holds nobody up.
  std::atomic<size_t> next_part = 0;
  const auto copy_parts = [&] {
    for (size_t at; (at = kPartBytes * next_part++) < size;) {
      CopyPart(to + at, from + at, std::min(kPartBytes, size - at));
    }
  };
  std::vector<std::thread> threads;
  try {
    while (threads.size() + 1 < std::min(size / kPartBytes, most)) threads.emplace_back(copy_parts);
  } catch (const std::system_error&) {  // no more threads are to be had
  }
  copy_parts();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace attnd
