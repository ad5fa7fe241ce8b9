#include "base/event_order.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"

namespace attnd {
namespace {

constexpr uint32_t kGrpcs = EPOLLIN | EPOLLOUT | EPOLLET;
constexpr int64_t kLarge = EventOrder::kLargeBytes, kSmall = 100;

// A set of gRPC's sockets, each a pair: the peer's end and ours.
class EventOrderTest : public testing::Test {
 protected:
  struct Socket {
    int there = -1, here = -1;
  };
  EventOrderTest() : epoll_(order_->Create(EPOLL_CLOEXEC)) {}
  ~EventOrderTest() override {
    for (auto& [name, socket] : sockets_) Close(socket);
    close(epoll_);
  }
  static void Close(const Socket& socket) {
    close(socket.there);
    close(socket.here);
  }

  void Add(uint64_t name) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    sockets_[name] = {pair[0], pair[1]};
    AddToSet(name);
  }
  void AddToSet(uint64_t name) {
    const int socket = sockets_[name].here;
    order_->Announce(socket);
    epoll_event event{};
    event.events = kGrpcs;
    event.data.u64 = name;
    EXPECT_EQ(order_->Control(epoll_, EPOLL_CTL_ADD, socket, &event), 0) << std::strerror(errno);
  }
  void AddAll(uint64_t first, uint64_t last) {
    for (uint64_t name = first; name <= last; ++name) Add(name);
    EXPECT_EQ(Wait(), 0u);
  }
  void Send(uint64_t name) { EXPECT_EQ(send(sockets_[name].there, "x", 1, 0), 1); }
  void Read(uint64_t name, int64_t bytes) { order_->OnRead(sockets_[name].here, bytes); }
  // What comes first, 0: nothing.
  uint64_t Wait(int timeout_ms = 0) {
    epoll_event events[100];
    const int got = order_->Wait(epoll_, events, 100, timeout_ms);
    EXPECT_LE(got, 1);
    return got == 1 ? events[0].data.u64 : 0;
  }

  // Before a read, as a program's recvmsg asks.
  bool HandOver(uint64_t name) {
    order_->OnMoves(sockets_[name].here, EventOrder::kMuchBytes);
    return order_->HandOver(sockets_[name].here);
  }

  std::unique_ptr<EventOrder> order_ = std::make_unique<EventOrder>();
  const int epoll_;
  std::map<uint64_t, Socket> sockets_;
};

TEST_F(EventOrderTest, GivesSocketsThatBringLittleFirst) {
  AddAll(1, 6);
  for (uint64_t name : {1, 2, 3}) Read(name, kLarge);
  for (uint64_t name : {1, 4, 2, 5, 3, 6}) Send(name);
  std::vector<uint64_t> given;
  for (int n = 0; n < 6; ++n) given.push_back(Wait());
  EXPECT_EQ(given, std::vector<uint64_t>({4, 5, 6, 1, 2, 3}));
  EXPECT_EQ(Wait(), 0u);
}

TEST_F(EventOrderTest, LetsAnEventThatComesLaterPass) {
  AddAll(1, 4);
  for (uint64_t name : {1, 2, 3}) Read(name, kLarge);
  for (uint64_t name : {1, 2, 3}) Send(name);
  EXPECT_EQ(Wait(), 1u);
  Send(4);
  EXPECT_EQ(Wait(), 4u);
  EXPECT_EQ(Wait(), 2u);
}

TEST_F(EventOrderTest, LetsALargeOneThroughBetweenSmallOnes) {
  AddAll(1, 2);
  Read(1, kLarge);
  for (int turn = 0; turn < 3; ++turn) {
    Send(1);
    Send(2);
    int passed = 0;
    while (Wait() == 2) {
      ++passed;
      Send(2);
      ASSERT_LE(passed, EventOrder::kSmallInARow);
    }
    EXPECT_EQ(passed, EventOrder::kSmallInARow);
    EXPECT_EQ(Wait(), 2u);
  }
}

TEST_F(EventOrderTest, TakesASocketForSmallAgainAfterSmallReads) {
  AddAll(1, 2);
  Read(1, kLarge);
  for (int n = 0; n < EventOrder::kLargeReads; ++n) Read(1, kSmall);
  Send(1);
  Send(2);
  EXPECT_EQ(Wait(), 1u);
}

TEST_F(EventOrderTest, TakesANewSocketForSmallWhateverHadItsNumber) {
  AddAll(1, 2);
  for (uint64_t name : {1, 2}) Read(name, kLarge);
  const int number = sockets_[2].here;
  Close(sockets_[2]);
  Add(2);
  ASSERT_EQ(sockets_[2].there, number - 1) << "the lowest free numbers";
  Send(1);
  Send(2);
  EXPECT_EQ(Wait(), 2u);
}

TEST_F(EventOrderTest, MakesEventsOfOneSocketOne) {
  AddAll(1, 2);
  for (uint64_t name : {1, 2}) Read(name, kLarge);
  Send(1);
  Send(2);
  EXPECT_EQ(Wait(), 1u);
  Send(2);
  shutdown(sockets_[2].there, SHUT_RDWR);
  epoll_event event;
  ASSERT_EQ(order_->Wait(epoll_, &event, 1, 0), 1);
  EXPECT_EQ(event.data.u64, 2u);
  EXPECT_EQ(event.events & (EPOLLIN | EPOLLHUP), uint32_t{EPOLLIN | EPOLLHUP});
  EXPECT_EQ(Wait(), 0u);
}

// A socket that can be written is no news until a write has found no room.
TEST_F(EventOrderTest, TellsThatASocketCanBeWrittenWhenAWriteHasFailed) {
  AddAll(1, 1);
  const Socket socket = sockets_[1];
  const std::string much(1 << 20, 'x');
  std::string bytes(much.size(), 0);
  auto drain = [&] {
    while (recv(socket.there, bytes.data(), bytes.size(), 0) > 0) {
    }
  };
  ASSERT_EQ(send(socket.here, "x", 1, 0), 1);
  drain();
  EXPECT_EQ(Wait(), 0u);
  while (send(socket.here, much.data(), much.size(), 0) > 0) {
  }
  order_->OnSendFailed(socket.here);
  EXPECT_EQ(Wait(), 0u);
  drain();
  EXPECT_EQ(Wait(), 1u);
  while (send(socket.here, much.data(), much.size(), 0) > 0) {
  }
  drain();
  order_->OnSendFailed(socket.here);
  EXPECT_EQ(Wait(), 1u) << "from then on always";
  Send(1);
  EXPECT_EQ(Wait(), 1u) << "and that it can be read";
}

TEST_F(EventOrderTest, ForgetsThatASocketWasQuietWhenItsNumberIsAnothers) {
  AddAll(1, 1);
  const int number = sockets_[1].here;
  Close(sockets_[1]);
  sockets_[2] = {socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0),
                 socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  sockets_.erase(1);
  ASSERT_EQ(sockets_[2].here, number) << "the lowest free numbers";
  AddToSet(2);
  EXPECT_EQ(Wait(), 2u);
  order_->OnSendFailed(number);
  EXPECT_EQ(Wait(), 0u);
}

TEST_F(EventOrderTest, TellsOfRoomThatCameBeforeItWasAskedFor) {
  AddAll(1, 1);
  const std::string much(1 << 20, 'x');
  std::string bytes(much.size(), 0);
  while (send(sockets_[1].here, much.data(), much.size(), 0) > 0) {
  }
  while (recv(sockets_[1].there, bytes.data(), bytes.size(), 0) > 0) {
  }
  order_->OnSendFailed(sockets_[1].here);
  EXPECT_EQ(Wait(), 1u);
}

// The set of a thread.
struct Own {
  explicit Own(EventOrder& owner) : order(owner) { order.Join(epoll); }
  ~Own() {
    order.Leave(epoll);
    close(epoll);
  }
  // What stands for a socket that has something; 0: nothing has.
  uint64_t Wait(int timeout_ms = 0) const {
    epoll_event event;
    return epoll_wait(epoll, &event, 1, timeout_ms) == 1 ? event.data.u64 : 0;
  }
  EventOrder& order;
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
};

TEST_F(EventOrderTest, HandsASocketThatMovesMuchToAThread) {
  AddAll(1, 2);
  const Own own(*order_);
  Send(1);
  EXPECT_EQ(Wait(), 1u);
  EXPECT_FALSE(order_->HandOver(sockets_[1].here)) << "it does not move much";
  ASSERT_TRUE(HandOver(1));
  EXPECT_EQ(own.Wait(), 1u) << "what has not been read";
  EXPECT_FALSE(HandOver(1)) << "it has gone";
  for (uint64_t name : {1, 2}) Send(name);
  EXPECT_EQ(own.Wait(), 1u);
  EXPECT_EQ(Wait(), 2u);
  EXPECT_EQ(own.Wait(), 0u);
  EXPECT_EQ(Wait(), 0u);
}

TEST_F(EventOrderTest, HandsEachToTheThreadWithTheFewest) {
  AddAll(1, 4);
  const Own a(*order_), b(*order_);
  for (uint64_t name : {1, 2, 3, 4}) {
    ASSERT_TRUE(HandOver(name));
    Send(name);
  }
  std::vector<uint64_t> of_a = {a.Wait(), a.Wait(), a.Wait()};
  std::vector<uint64_t> of_b = {b.Wait(), b.Wait(), b.Wait()};
  EXPECT_EQ(of_a, std::vector<uint64_t>({1, 3, 0}));
  EXPECT_EQ(of_b, std::vector<uint64_t>({2, 4, 0}));
  for (uint64_t name : {1, 3}) {
    Close(sockets_[name]);
    Add(name);
    ASSERT_TRUE(HandOver(name)) << "has no more sockets";
    Send(name);
    EXPECT_EQ(a.Wait(), name);
  }
}

TEST_F(EventOrderTest, TakesASocketBackThatHasNotMovedMuchForAWhile) {
  AddAll(1, 2);
  const Own own(*order_);
  for (uint64_t name : {1, 2}) ASSERT_TRUE(HandOver(name));
  order_->TakeBack(own.epoll);
  Send(1);
  EXPECT_EQ(own.Wait(), 1u) << "too early";
  uint64_t came = 0;
  while ((came = Wait(20)) == 0) {
    order_->OnMoves(sockets_[2].here, EventOrder::kMuchBytes);
    order_->TakeBack(own.epoll);
  }
  EXPECT_EQ(came, 1u) << "the kernel tells of what is there";
  Send(1);
  Send(2);
  EXPECT_EQ(Wait(), 1u);
  EXPECT_EQ(Wait(), 0u);
  EXPECT_EQ(own.Wait(), 2u);
}

TEST_F(EventOrderTest, GivesBackTheSocketsOfAThreadThatLeaves) {
  AddAll(1, 2);
  {
    const Own own(*order_);
    for (uint64_t name : {1, 2}) ASSERT_TRUE(HandOver(name));
    Send(1);
    Close(sockets_[2]);
    Add(2);  // another, perhaps of that number
  }
  Send(2);
  EXPECT_EQ(Wait() + Wait(), 3u);
  EXPECT_FALSE(HandOver(1)) << "nobody is left";
}

// A thread gives a socket back while it is closed, and its number goes to another.
TEST_F(EventOrderTest, NamesASocketAnewThatIsInTheSetAlready) {
  AddAll(1, 1);
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
  epoll_event event{};
  event.events = kGrpcs;
  event.data.u64 = 7;
  ASSERT_EQ(epoll_ctl(epoll_, EPOLL_CTL_ADD, pair[1], &event), 0);
  sockets_[2] = {pair[0], pair[1]};
  AddToSet(2);
  Send(2);
  EXPECT_EQ(Wait(), 2u);
  EXPECT_EQ(Wait(), 0u);
}

TEST_F(EventOrderTest, RemovesASocketFromTheSetThatItIsIn) {
  AddAll(1, 1);
  const Own own(*order_);
  ASSERT_TRUE(HandOver(1));
  EXPECT_EQ(order_->Control(epoll_, EPOLL_CTL_DEL, sockets_[1].here, nullptr), 0);
  Send(1);
  EXPECT_EQ(own.Wait(), 0u);
  AddToSet(1);
  EXPECT_EQ(Wait(), 1u);
}

TEST_F(EventOrderTest, TellsTheThreadOfRoomOnceAWriteHasFailed) {
  AddAll(1, 1);
  const Own own(*order_);
  ASSERT_TRUE(HandOver(1));
  const std::string much(1 << 20, 'x');
  std::string bytes(much.size(), 0);
  EXPECT_EQ(own.Wait(), 0u) << "it is quiet there too";
  while (send(sockets_[1].here, much.data(), much.size(), 0) > 0) {
  }
  order_->OnSendFailed(sockets_[1].here);
  EXPECT_EQ(own.Wait(), 0u);
  while (recv(sockets_[1].there, bytes.data(), bytes.size(), 0) > 0) {
  }
  EXPECT_EQ(own.Wait(), 1u);
}

// A connection of another client within the process, perhaps.
TEST_F(EventOrderTest, KeepsASocketThatCameBeforeTheSetWasKnown) {
  const Own own(*order_);
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
  sockets_[5] = {pair[0], pair[1]};
  epoll_event event{};
  event.events = kGrpcs;
  event.data.u64 = 5;
  ASSERT_EQ(order_->Control(epoll_, EPOLL_CTL_ADD, pair[1], &event), 0);
  Add(1);
  EXPECT_FALSE(HandOver(5));
  EXPECT_EQ(Wait(), 5u) << "it can be written";
  Send(5);
  EXPECT_EQ(Wait(), 5u);
}

TEST_F(EventOrderTest, HandsNothingOverInAChildWhoseParentHasTheThreads) {
  AddAll(1, 1);
  const Own own(*order_);
  const pid_t child = fork();
  if (child == 0) _exit(HandOver(1) ? 1 : 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(HandOver(1));
}

// gRPC adds a socket between connect(2) and looking at what that has said.
TEST_F(EventOrderTest, KeepsErrnoWhenASocketIsAdded) {
  const int connecting = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  ASSERT_GE(connecting, 0);
  order_->Announce(connecting);
  epoll_event event{};
  event.events = kGrpcs;
  event.data.u64 = 1;
  errno = EINPROGRESS;
  EXPECT_EQ(order_->Control(epoll_, EPOLL_CTL_ADD, connecting, &event), 0);
  EXPECT_EQ(errno, EINPROGRESS);
  close(connecting);
}

TEST_F(EventOrderTest, LeavesOtherSetsAlone) {
  AddAll(1, 3);
  Close(sockets_[3]);  // its number was announced once
  sockets_.erase(3);
  const int other = order_->Create(EPOLL_CLOEXEC);
  int events[2] = {eventfd(1, EFD_CLOEXEC), eventfd(1, EFD_CLOEXEC)};
  epoll_event event{};
  event.events = kGrpcs;
  for (int one : events) EXPECT_EQ(order_->Control(other, EPOLL_CTL_ADD, one, &event), 0);
  Send(1);
  Send(2);
  EXPECT_EQ(Wait(), 1u);
  epoll_event got[10];
  EXPECT_EQ(order_->Wait(other, got, 10, 0), 2);
  EXPECT_EQ(Wait(), 2u) << "was kept";
  for (int one : {events[0], events[1], other}) close(one);
}

TEST_F(EventOrderTest, ForgetsWhatItKeptWhenTheSetIsMadeAnew) {
  AddAll(1, 4);
  for (uint64_t name : {3, 4}) Read(name, kLarge);
  for (uint64_t name : {1, 2, 3, 4}) Send(name);
  EXPECT_EQ(Wait(), 1u);
  close(epoll_);
  ASSERT_EQ(order_->Create(EPOLL_CLOEXEC), epoll_) << "the lowest free number";
  EXPECT_EQ(Wait(), 0u);
  AddAll(7, 8);
  Send(8);
  EXPECT_EQ(Wait(), 8u);
}

TEST_F(EventOrderTest, SleepsUntilSomethingComes) {
  AddAll(1, 1);
  std::thread later([&] { Send(1); });
  EXPECT_EQ(Wait(-1), 1u);
  later.join();
  EXPECT_EQ(Wait(5), 0u);
}

// gRPC's own fork handler closes the set and makes another.
TEST_F(EventOrderTest, BeginsWithNothingInAChildThatMakesItsSetAnew) {
  AddAll(1, 3);
  for (uint64_t name : {1, 2, 3}) {
    Read(name, kLarge);
    Send(name);
  }
  EXPECT_EQ(Wait(), 1u);
  const pid_t child = fork();
  if (child == 0) {
    close(epoll_);
    const bool anew = order_->Create(EPOLL_CLOEXEC) == epoll_ && Wait() == 0;
    AddAll(7, 8);
    Send(8);
    _exit(anew && Wait() == 8 && !HasFailure() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Wait(), 2u) << "the parent's are its own";
}

TEST_F(EventOrderTest, AnswersAsTheKernelDoes) {
  AddAll(1, 1);
  epoll_event event;
  EXPECT_EQ(order_->Wait(epoll_, &event, 0, 0), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(order_->Control(epoll_, EPOLL_CTL_DEL, epoll_ + 1000, nullptr), -1);
  EXPECT_EQ(errno, EBADF);
  struct sigaction nothing {};
  nothing.sa_handler = [](int) {};
  sigaction(SIGALRM, &nothing, nullptr);
  const itimerval soon = {.it_interval = {0, 1000}, .it_value = {0, 1000}}, never = {};
  setitimer(ITIMER_REAL, &soon, nullptr);
  EXPECT_EQ(order_->Wait(epoll_, &event, 1, -1), -1);
  EXPECT_EQ(errno, EINTR);
  setitimer(ITIMER_REAL, &never, nullptr);
  close(epoll_);
  EXPECT_EQ(order_->Wait(epoll_, &event, 1, 0), -1);
  EXPECT_EQ(errno, EBADF);
  ASSERT_EQ(order_->Create(EPOLL_CLOEXEC), epoll_);
}

// Two threads wait for all and one for its own while sockets send, close, go to its set and back,
// and others come with their numbers and names, and now and then all of them with a new set: what a
// socket has sent is told of after it was sent.
TEST_F(EventOrderTest, LosesNoEdgeWhateverComesAndGoes) {
  constexpr int kSockets = 20, kRounds = 300, kSteps = 60;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  AddAll(1, kSockets);
  int sent[kSockets + 1] = {}, seen[kSockets + 1] = {};
  absl::Mutex mutex;  // of these and the sockets
  std::atomic<bool> done{false};
  auto read = [&](uint64_t name, bool large) {
    absl::MutexLock lock(&mutex);
    if (large && HandOver(name)) return;
    char bytes[256];
    ssize_t got = 0;
    while ((got = recv(sockets_[name].here, bytes, sizeof(bytes), 0)) > 0) {
      seen[name] += static_cast<int>(got);
      Read(name, large ? kLarge : kSmall);
    }
  };
  auto wait = [&](uint32_t own_seed) {
    std::mt19937 own(own_seed);
    epoll_event events[100];
    while (!done) {
      const int got = order_->Wait(epoll_, events, 100, 1);  // several of a set that begins
      for (int n = 0; n < got; ++n) read(events[n].data.u64, own() % 2 == 0);
    }
  };
  auto own = std::make_unique<Own>(*order_);
  auto wait_for_own = [&](uint32_t own_seed) {
    std::mt19937 own_random(own_seed);
    while (!done) {
      if (const uint64_t name = own->Wait(1); name != 0) read(name, false);
      if (own_random() % 20 == 0) order_->TakeBack(own->epoll);
      if (own_random() % 100 == 0) {
        own.reset();
        own = std::make_unique<Own>(*order_);
      }
    }
  };
  auto all_seen = [&] { return std::equal(std::begin(sent), std::end(sent), std::begin(seen)); };
  auto replace = [&](uint64_t name) {  // its number and its name go to another
    Close(sockets_[name]);
    Add(name);
    sent[name] = seen[name] = 0;
  };
  std::thread first(wait, seed + 1), second(wait, seed + 2), third(wait_for_own, seed + 3);
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    if (round % 30 == 29) {
      absl::MutexLock lock(&mutex);
      close(epoll_);
      EXPECT_EQ(order_->Create(EPOLL_CLOEXEC), epoll_);
      for (uint64_t name = 1; name <= kSockets; ++name) replace(name);
    }
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t name = 1 + random() % kSockets;
      absl::MutexLock lock(&mutex);
      if (random() % 50 == 0) replace(name);
      if (send(sockets_[name].there, "x", 1, 0) == 1) ++sent[name];
    }
    absl::MutexLock lock(&mutex);
    EXPECT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&all_seen), absl::Seconds(10)))
        << "round " << round;
  }
  done = true;
  first.join();
  second.join();
  third.join();
}

// Those of this program, which links program_calls.
TEST(ProgramCalls, AreOrdered) {
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  int pairs[2][2];
  for (int n : {0, 1}) {
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pairs[n]), 0);
    EventOrder::Get().Announce(pairs[n][0]);
    epoll_event event{};
    event.events = kGrpcs;
    event.data.u64 = static_cast<uint64_t>(n + 1);
    ASSERT_EQ(epoll_ctl(epoll, EPOLL_CTL_ADD, pairs[n][0], &event), 0);
  }
  epoll_event events[10];
  EXPECT_EQ(epoll_wait(epoll, events, 10, 0), 0);
  const std::string much(kLarge, 'x');
  ASSERT_EQ(send(pairs[0][1], much.data(), much.size(), 0), kLarge);
  std::string bytes(kLarge, 0);
  iovec piece = {bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  ASSERT_EQ(recvmsg(pairs[0][0], &message, 0), kLarge);
  for (int n : {0, 1}) ASSERT_EQ(send(pairs[n][1], "x", 1, 0), 1);
  ASSERT_EQ(epoll_wait(epoll, events, 10, 0), 1);
  EXPECT_EQ(events[0].data.u64, 2u) << "the large one came first";
  ASSERT_EQ(epoll_wait(epoll, events, 10, 0), 1);
  while (sendmsg(pairs[0][0], &message, 0) > 0) {
  }
  EXPECT_EQ(errno, EAGAIN);
  while (recv(pairs[0][1], bytes.data(), bytes.size(), 0) > 0) {
  }
  ASSERT_EQ(epoll_wait(epoll, events, 10, 0), 1);
  EXPECT_NE(events[0].events & EPOLLOUT, 0u);
  for (auto& pair : pairs) {
    close(pair[0]);
    close(pair[1]);
  }
  close(epoll);
}

}  // namespace
}  // namespace attnd
