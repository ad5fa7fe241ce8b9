#include "server/reply_threads.h"

#include <gtest/gtest.h>

#include <atomic>

namespace attnd {
namespace {

TEST(ReplyThreads, RunsEachReplyOnceEvenThoseLeftAtTheEnd) {
  std::atomic<int> sent[100] = {};
  {
    ReplyThreads threads(3);
    for (auto& count : sent) threads.Run([&count] { ++count; });
  }
  for (auto& count : sent) EXPECT_EQ(count, 1);
}

}  // namespace
}  // namespace attnd
