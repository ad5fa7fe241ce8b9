// Choices: numbers from a fuzzer's bytes; 0 when they have run out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnd {

class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  int64_t Between(int64_t low, int64_t high) {
    uint64_t number = 0;
    const uint64_t count = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;
    for (uint64_t most = count - 1; most > 0; most >>= 8) number = number << 8 | Byte();
    return low + static_cast<int64_t>(count == 0 ? number : number % count);
  }
  uint64_t Byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

}  // namespace attnd
