// The supervisor over children that end as a test wants.
#include "server/supervisor.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

namespace attnd {
namespace {

// A number that all processes of a test share.
class SharedCount {
 public:
  SharedCount()
      : value_(static_cast<int*>(mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedCount() { munmap(value_, sizeof(int)); }
  int Next() { return ++*value_; }
  int value() const { return *value_; }

 private:
  int* const value_;
};

class SupervisorTest : public testing::Test {
 protected:
  SupervisorTest() : log_(stderr, LogFormat::kText, Severity::kError) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigprocmask(SIG_BLOCK, &signals, nullptr);
  }
  int Run(const std::function<int()>& serve) {
    return Supervise(serve,
                     {.first_delay = absl::Milliseconds(1), .longest_delay = absl::Milliseconds(4)},
                     log_);
  }
  Logger log_;
  SharedCount starts_;
};

TEST_F(SupervisorTest, StartsAgainUntilTheServerEndsWell) {
  EXPECT_EQ(Run([&] { return starts_.Next() < 4 ? 4 : 0; }), 0);
  EXPECT_EQ(starts_.value(), 4);
}

TEST_F(SupervisorTest, StartsAgainAfterACrash) {
  EXPECT_EQ(Run([&] {
              if (starts_.Next() == 1) raise(SIGKILL);
              return 0;
            }),
            0);
  EXPECT_EQ(starts_.value(), 2);
}

TEST_F(SupervisorTest, GivesUpWhereStartingAgainWouldNotHelp) {
  EXPECT_EQ(Run([&] {
              starts_.Next();
              return 2;
            }),
            2);
  EXPECT_EQ(starts_.value(), 1);
}

TEST_F(SupervisorTest, PassesASignalOnAndDoesNotStartAgain) {
  const pid_t parent = getpid();
  EXPECT_EQ(Run([&] {
              starts_.Next();
              kill(parent, SIGTERM);  // as from outside
              sigset_t signals;
              sigemptyset(&signals);
              sigaddset(&signals, SIGTERM);
              int signal = 0;
              sigwait(&signals, &signal);  // the child's own, passed on
              return 7;
            }),
            7);
  EXPECT_EQ(starts_.value(), 1);
}

}  // namespace
}  // namespace attnd
