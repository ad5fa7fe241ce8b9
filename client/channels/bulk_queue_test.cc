#include "client/channels/bulk_queue.h"

#include <grpcpp/alarm.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"

namespace attnd {
namespace {

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

// Hears of events and passes them on.
struct Listener final : EventSink {
  void OnEvent(QueueTag* tag, bool ok) override {
    EXPECT_TRUE(ok);
    mailbox.Put(tag);
  }
  Mailbox mailbox;
};

// An event, now.
struct Ring {
  Ring(BulkQueue::Use& use, Listener& listener) : tag{&listener} {
    alarm.Set(&use.queue(), std::chrono::system_clock::now(), &tag);
  }
  QueueTag tag;
  grpc::Alarm alarm;
};

TEST(Mailbox, GivesTagsInTheirOrderAndNothingWhenNoneComes) {
  Mailbox mailbox;
  QueueTag a, b;
  mailbox.Put(&a);
  mailbox.Put(&b);
  EXPECT_EQ(mailbox.Take(Soon()), &a);
  EXPECT_EQ(mailbox.Take(Soon()), &b);
  EXPECT_EQ(mailbox.Take(absl::Now() + absl::Milliseconds(1)), nullptr);
}

TEST(Mailbox, WakesTheThreadThatWaits) {
  Mailbox mailbox;
  QueueTag tag;
  std::thread other([&] { mailbox.Put(&tag); });
  EXPECT_EQ(mailbox.Take(Soon()), &tag);
  other.join();
}

TEST(BulkQueue, TellsEachEventToTheSinkOfItsTag) {
  BulkQueue queue(3);
  BulkQueue::Use use(queue);
  Listener listeners[2];
  std::vector<std::unique_ptr<Ring>> rings;
  for (int n = 0; n < 20; ++n) rings.push_back(std::make_unique<Ring>(use, listeners[n % 2]));
  for (int n = 0; n < 20; ++n) {
    QueueTag* tag = listeners[n % 2].mailbox.Take(Soon());
    ASSERT_NE(tag, nullptr);
    EXPECT_EQ(tag->sink, &listeners[n % 2]);
  }
}

TEST(BulkQueue, IsDrivenAgainAfterAPause) {
  BulkQueue queue(1);
  Listener listener;
  { BulkQueue::Use first(queue); }
  // Its thread lingers for less.
  EXPECT_EQ(listener.mailbox.Take(absl::Now() + absl::Milliseconds(100)), nullptr);
  auto use = std::make_unique<BulkQueue::Use>(queue);
  Ring ring(*use, listener);
  EXPECT_EQ(listener.mailbox.Take(Soon()), &ring.tag);
}

}  // namespace
}  // namespace attnd
