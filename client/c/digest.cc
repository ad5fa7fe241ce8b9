// attnd_digest: at the speed of memory. Four lanes, each a chain of 64 × 64 → 128 bit products,
// folded to 64 as in wyhash, so that no lane waits for another's product.
#include <cstdint>
#include <cstring>

#include "client/c/attnd_client.h"

namespace {

constexpr uint64_t kLanes[4] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb,
                                0xd6e8feb86659fd93};

uint64_t FoldedProduct(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t WordAt(const char* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

}  // namespace

uint64_t attnd_digest(const void* data, int64_t bytes) {
  constexpr int64_t kBlock = 64;
  const char* next = static_cast<const char*>(data);
  // Other numbers than those beside them: the two words of a product must not be interchangeable.
  uint64_t lanes[4] = {~kLanes[1], ~kLanes[2], ~kLanes[3], ~kLanes[0]};
  const auto take = [&lanes](const char* block) {
    for (int n = 0; n < 4; ++n) {
      const uint64_t first = WordAt(block + 16 * n), second = WordAt(block + 16 * n + 8);
      lanes[n] = FoldedProduct(first ^ kLanes[n], second ^ lanes[n]);
    }
  };
  int64_t left = bytes;
  for (; left >= kBlock; left -= kBlock, next += kBlock) take(next);
  if (left > 0) {
    char rest[kBlock] = {};
    std::memcpy(rest, next, static_cast<size_t>(left));
    take(rest);
  }
  uint64_t made = static_cast<uint64_t>(bytes) ^ kLanes[0];
  for (int n = 0; n < 4; ++n) made = FoldedProduct(made ^ lanes[n], kLanes[(n + 1) % 4]);
  return made;
}
