#include "client/call/lease_book.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace attnd {
namespace {

// Servers that note what they are asked.
class Servers {
 public:
  LeaseBook::Calls Calls() {
    return {
        .renew = [this](int address, const std::string& token) -> absl::StatusOr<absl::Duration> {
          absl::MutexLock lock(&mutex_);
          renewed_.push_back(absl::StrCat(address, " ", token));
          if (!answer_.ok()) return answer_;
          return absl::Hours(1);
        },
        .release =
            [this](int address, const std::vector<std::string>& tokens) {
              absl::MutexLock lock(&mutex_);
              ++releases_;
              for (const std::string& token : tokens) {
                released_.push_back(absl::StrCat(address, " ", token));
              }
            }};
  }
  void AnswerWith(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    answer_ = std::move(status);
  }
  std::vector<std::string> WaitForReleased(size_t count) {
    absl::MutexLock lock(&mutex_);
    auto enough = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return released_.size() >= count; };
    mutex_.Await(absl::Condition(&enough));
    std::sort(released_.begin(), released_.end());
    return released_;
  }
  std::vector<std::string> WaitForRenewed(size_t count) {
    absl::MutexLock lock(&mutex_);
    auto enough = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return renewed_.size() >= count; };
    mutex_.Await(absl::Condition(&enough));
    return renewed_;
  }
  int releases() {
    absl::MutexLock lock(&mutex_);
    return releases_;
  }

 private:
  absl::Mutex mutex_;
  absl::Status answer_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> renewed_, released_;
  int releases_ ABSL_GUARDED_BY(mutex_) = 0;
};

HeldLease Lease(const std::string& token, int address = 0, absl::Duration life = absl::Minutes(2)) {
  return {.token = token, .address = address, .life = life, .bytes = 10};
}

TEST(LeaseBook, FindsWhatIsHeldUntilItIsLostOrReleased) {
  Servers servers;
  RealClock clock;
  LeaseBook book(servers.Calls(), clock);
  LeaseBook::Id a = book.Add(Lease("a", 1)), b = book.Add(Lease("b"));
  ASSERT_TRUE(book.Find(a).has_value());
  EXPECT_EQ(book.Find(a)->token, "a");
  EXPECT_EQ(book.Find(a)->address, 1);
  book.Lost(a);
  EXPECT_FALSE(book.Find(a).has_value());
  book.Release(a);  // which asks nobody for what is lost
  book.Release(b);
  EXPECT_FALSE(book.Find(b).has_value());
  EXPECT_EQ(servers.WaitForReleased(1), std::vector<std::string>{"0 b"});
}

TEST(LeaseBook, GivesManyBackInFewCalls) {
  Servers servers;
  RealClock clock;
  LeaseBook book(servers.Calls(), clock);
  std::vector<LeaseBook::Id> ids;
  for (int n = 0; n < 600; ++n) ids.push_back(book.Add(Lease(absl::StrCat(n), n % 2)));
  for (LeaseBook::Id id : ids) book.Release(id);
  EXPECT_EQ(servers.WaitForReleased(600).size(), 600u);
  EXPECT_LT(servers.releases(), 100);
}

TEST(LeaseBook, RenewsAtHalfOfTheLife) {
  Servers servers;
  FakeClock clock;
  LeaseBook book(servers.Calls(), clock);
  book.Add(Lease("long"));
  clock.Advance(absl::Minutes(1));
  LeaseBook::Id other = book.Add(Lease("other"));
  book.Release(other);  // wakes the book's thread, which looks at the clock
  EXPECT_EQ(servers.WaitForRenewed(1), std::vector<std::string>{"0 long"});
}

TEST(LeaseBook, ForgetsALeaseThatCannotBeRenewedAndKeepsOneWhoseServerIsAway) {
  for (bool away : {false, true}) {
    Servers servers;
    FakeClock clock;
    LeaseBook book(servers.Calls(), clock);
    servers.AnswerWith(away ? absl::UnavailableError("away")
                            : absl::FailedPreconditionError("gone"));
    LeaseBook::Id id = book.Add(Lease("a"));
    clock.Advance(absl::Minutes(1));
    book.Release(book.Add(Lease("b")));
    servers.WaitForRenewed(1);
    book.Release(book.Add(Lease("c")));
    servers.WaitForReleased(2);  // after the renewal was dealt with
    EXPECT_EQ(book.Find(id).has_value(), away);
  }
}

TEST(LeaseBook, GivesEverythingBackWhenItIsClosed) {
  Servers servers;
  RealClock clock;
  LeaseBook book(servers.Calls(), clock);
  LeaseBook::Id id = book.Add(Lease("a"));
  book.Close();
  EXPECT_EQ(servers.WaitForReleased(1), std::vector<std::string>{"0 a"});
  EXPECT_FALSE(book.Find(id).has_value());
  EXPECT_EQ(book.Add(Lease("b")), 0u);
  book.Release(id);
  book.Close();
}

}  // namespace
}  // namespace attnd
