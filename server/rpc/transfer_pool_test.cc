#include "server/rpc/transfer_pool.h"

#include <gtest/gtest.h>

#include <atomic>

namespace attnd {
namespace {

TEST(TransferPool, RunsEachReplyOnceEvenThoseLeftAtTheEnd) {
  std::atomic<int> sent[100] = {};
  {
    TransferPool threads(3);
    for (auto& count : sent) threads.Run([&count] { ++count; });
  }
  for (auto& count : sent) EXPECT_EQ(count, 1);
}

}  // namespace
}  // namespace attnd
