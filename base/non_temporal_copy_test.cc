#include "base/non_temporal_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace attnd {
namespace {

TEST(CopyNonTemporal, CopiesExactlyTheBytesAtAnyAlignmentAndSize) {
  std::vector<std::byte> from(400);
  for (size_t n = 0; n < from.size(); ++n) from[n] = static_cast<std::byte>(n * 7 + 1);
  for (size_t offset = 0; offset < 17; ++offset) {
    for (size_t size : {0, 1, 15, 16, 17, 63, 64, 65, 200, 333}) {
      std::vector<std::byte> to(400, std::byte{0xaa});
      CopyNonTemporal(to.data() + offset, from.data() + 3, size);
      for (size_t n = 0; n < to.size(); ++n) {
        bool inside = n >= offset && n < offset + size;
        ASSERT_EQ(to[n], inside ? from[n - offset + 3] : std::byte{0xaa}) << offset << " " << size;
      }
    }
  }
}

TEST(CopyNonTemporal, CopiesAllPartsOfALargeOneWithAnyThreads) {
  for (const size_t size : {(size_t{2} << 20) - 1, size_t{2} << 20, (size_t{5} << 20) + 77}) {
    for (const int threads : {0, 1, 3, 8}) {
      std::vector<std::byte> from(size), to(size + 1);
      for (size_t n = 0; n < size; ++n) from[n] = static_cast<std::byte>(n * 2654435761U >> 13);
      CopyNonTemporal(to.data(), from.data(), size, threads);
      EXPECT_EQ(std::memcmp(to.data(), from.data(), size), 0) << size << " by " << threads;
      EXPECT_EQ(to[size], std::byte{0});
    }
  }
}

}  // namespace
}  // namespace attnd
