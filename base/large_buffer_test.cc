#include "base/large_buffer.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

namespace attnd {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * 4096;
}

TEST(LargeBuffer, IsZeroedAndAlignedOnBothSidesOfTheLimit) {
  for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{1000}, LargeBuffer::kMappedFrom - 1,
                        LargeBuffer::kMappedFrom, LargeBuffer::kMappedFrom + 1}) {
    for (int round = 0; round < 2; ++round) {  // the second may have the first one's memory
      absl::StatusOr<LargeBuffer> buffer = LargeBuffer::Make(bytes);
      ASSERT_TRUE(buffer.ok()) << buffer.status();
      std::byte* const data = buffer->data();
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % LargeBuffer::kAlignment, 0u) << bytes;
      EXPECT_EQ(std::count(data, data + bytes, std::byte{0}), bytes);
      std::fill(data, data + bytes, std::byte{1});
      const LargeBuffer moved = *std::move(buffer);
      EXPECT_EQ(moved.data(), data);
    }
  }
}

TEST(LargeBuffer, SaysThatTheMachineHasNoSuchMemory) {
  EXPECT_TRUE(absl::IsResourceExhausted(LargeBuffer::Make(int64_t{1} << 60).status()));
}

// As net/process_tuning.h has it.
TEST(LargeBuffer, GivesItsPagesBackWhateverTheHeapKeeps) {
  mallopt(M_TRIM_THRESHOLD, 2000000000);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  std::vector<std::unique_ptr<char[]>> others;  // what else the process takes from the heap
  const int64_t before = ResidentBytes();
  for (int64_t round = 0; round < 50; ++round) {
    ASSERT_TRUE(LargeBuffer::Make(8 * kMiB + round % 7 * kMiB).ok());
    others.push_back(std::make_unique<char[]>(1000));
    ASSERT_LT(ResidentBytes() - before, 4 * kMiB) << "round " << round;
  }
}

}  // namespace
}  // namespace attnd
