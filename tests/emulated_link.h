// EmulatedLink: two hosts on one machine, each a network namespace, and a link between them with a
// delay, a rate, losses and reordering. Both ends are TUN devices whose packets this process
// carries across, so that real TCP connections meet it, and no kernel module is needed.
//
//     EmulatedLink link;                                     // its maker's thread is host A
//     link.OnOtherHost([&] { start the daemon, listening on link.other_address() });
//     link.Change({.delay = absl::Milliseconds(10)});
//
// Needs root and /dev/net/tun: see Supported. One for a process, made before anything else starts a
// thread: threads live on the host on which their maker was. Threads: one uses it.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "attention/random_problem.h"
#include "base/check.h"

namespace attnd {

class EmulatedLink {
 public:
  // Of each direction.
  struct Options {
    absl::Duration delay = absl::ZeroDuration();  // half of the round trip
    double bits_per_second = 0;                   // 0: as fast as packets can be carried
    double loss = 0;                              // probability that a packet is dropped
    double reorder = 0;                           // probability that one overtakes those before it
    int64_t queue_bytes = int64_t{64} << 20;      // that wait; beyond: dropped
    uint64_t seed = 1;
  };

  // Whether this process may make namespaces and TUN devices.
  static bool Supported() {
    bool supported = false;
    std::thread([&] {
      if (unshare(CLONE_NEWNET) != 0) return;
      int tun = open("/dev/net/tun", O_RDWR | O_CLOEXEC);
      ifreq request{};
      request.ifr_flags = IFF_TUN | IFF_NO_PI;
      supported = tun >= 0 && ioctl(tun, TUNSETIFF, &request) == 0;
      close(tun);
    }).join();
    return supported;
  }

  EmulatedLink() {
    CHECK(unshare(CLONE_NEWNET) == 0) << "unshare";
    ends_[0] = MakeEnd("10.77.0.1");
    OnNewHost([this] { ends_[1] = MakeEnd("10.77.0.2"); });
    for (int n : {0, 1}) {
      carriers_[n] = std::thread([this, n] { Carry(ends_[n], ends_[1 - n], n); });
    }
  }
  ~EmulatedLink() {
    stop_ = true;
    for (std::thread& carrier : carriers_) carrier.join();
    for (int end : ends_) close(end);
    close(other_host_);
  }
  EmulatedLink(const EmulatedLink&) = delete;
  EmulatedLink& operator=(const EmulatedLink&) = delete;

  // From the next packet on.
  void Change(const Options& options) {
    absl::MutexLock lock(&mutex_);
    options_ = options;
    ++version_;
  }

  const char* other_address() const { return "10.77.0.2"; }

  // Runs `work` on a thread of the other host; processes and threads that it starts live there.
  void OnOtherHost(const std::function<void()>& work) {
    std::thread([&] {
      CHECK(setns(other_host_, CLONE_NEWNET) == 0) << "setns";
      work();
    }).join();
  }

  int64_t dropped() const { return dropped_; }
  int64_t overtook() const { return overtook_[0] + overtook_[1]; }

 private:
  static constexpr int kMtu = 9000;

  void OnNewHost(const std::function<void()>& work) {
    std::thread([&] {
      CHECK(unshare(CLONE_NEWNET) == 0) << "unshare";
      other_host_ = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
      CHECK(other_host_ >= 0) << "/proc/thread-self/ns/net";
      work();
    }).join();
  }

  // A TUN device with this address, up, in the namespace of the calling thread; lo too.
  static int MakeEnd(const char* address) {
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    CHECK(tun >= 0) << "/dev/net/tun";
    ifreq request{};
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    std::strcpy(request.ifr_name, "link0");
    CHECK(ioctl(tun, TUNSETIFF, &request) == 0) << "TUNSETIFF";
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    SetAddress(control, SIOCSIFADDR, address);
    SetAddress(control, SIOCSIFNETMASK, "255.255.255.0");
    request.ifr_mtu = kMtu;
    CHECK(ioctl(control, SIOCSIFMTU, &request) == 0) << "SIOCSIFMTU";
    request.ifr_qlen = 10000;
    (void)ioctl(control, SIOCSIFTXQLEN, &request);  // not every sandbox allows it; 500 then
    for (const char* name : {"link0", "lo"}) {
      ifreq up{};
      std::strcpy(up.ifr_name, name);
      up.ifr_flags = IFF_UP | IFF_RUNNING;
      CHECK(ioctl(control, SIOCSIFFLAGS, &up) == 0) << "SIOCSIFFLAGS " << name;
    }
    close(control);
    return tun;
  }

  static void SetAddress(int control, unsigned long what, const char* text) {
    ifreq request{};
    std::strcpy(request.ifr_name, "link0");
    auto& address = reinterpret_cast<sockaddr_in&>(request.ifr_addr);
    address.sin_family = AF_INET;
    CHECK(inet_pton(AF_INET, text, &address.sin_addr) == 1) << text;
    CHECK(ioctl(control, what, &request) == 0) << text;
  }

  // One direction. What waits is ordered by the time at which it is due, in nanoseconds.
  class Direction {
   public:
    void Use(const Options& options, uint64_t seed) {
      options_ = options;
      random_ = Random(seed);
    }
    // False: dropped.
    bool Take(const char* packet, int64_t size, int64_t now) {
      if (random_.Chance(options_.loss) || queued_ + size > options_.queue_bytes) return false;
      line_free_ = std::max(line_free_, now);
      if (options_.bits_per_second > 0) {
        line_free_ += static_cast<int64_t>(double(size) * 8e9 / options_.bits_per_second);
      }
      bool overtakes = random_.Chance(options_.reorder);
      overtook_ += overtakes;
      int64_t due = overtakes ? now : line_free_ + absl::ToInt64Nanoseconds(options_.delay);
      waiting_.emplace(due, std::vector<char>(packet, packet + size));
      queued_ += size;
      return true;
    }
    int64_t NextDue() const { return waiting_.empty() ? INT64_MAX : waiting_.begin()->first; }
    std::vector<char> Pop() {
      std::vector<char> packet = std::move(waiting_.begin()->second);
      waiting_.erase(waiting_.begin());
      queued_ -= static_cast<int64_t>(packet.size());
      return packet;
    }
    int64_t overtook() const { return overtook_; }

   private:
    Options options_;
    Random random_{0};
    std::multimap<int64_t, std::vector<char>> waiting_;
    int64_t queued_ = 0, overtook_ = 0;
    int64_t line_free_ = 0;  // when the last packet has left
  };

  void Carry(int from, int to, int number) {
    Direction direction;
    int64_t version = -1;
    std::vector<char> buffer(65536);
    while (!stop_) {
      Wait(from, direction.NextDue());
      {
        absl::MutexLock lock(&mutex_);
        if (version != version_) {
          direction.Use(options_, options_.seed * 2 + static_cast<uint64_t>(number));
        }
        version = version_;
      }
      int64_t now = absl::GetCurrentTimeNanos();
      for (int burst = 0; burst < 64; ++burst) {
        ssize_t size = read(from, buffer.data(), buffer.size());
        if (size <= 0) break;
        if (!direction.Take(buffer.data(), size, now)) ++dropped_;
      }
      overtook_[number] = direction.overtook();
      now = absl::GetCurrentTimeNanos();
      while (direction.NextDue() <= now) {
        std::vector<char> packet = direction.Pop();
        if (write(to, packet.data(), packet.size()) < 0) ++dropped_;
      }
    }
  }

  // Until a packet comes, or `due`, or the end has to be looked for.
  static void Wait(int from, int64_t due) {
    constexpr int64_t kMost = 20'000'000;
    int64_t left = std::clamp<int64_t>(due - absl::GetCurrentTimeNanos(), 0, kMost);
    timespec time{0, static_cast<long>(left)};
    pollfd event{from, POLLIN, 0};
    ppoll(&event, 1, &time, nullptr);
  }

  absl::Mutex mutex_;
  Options options_ ABSL_GUARDED_BY(mutex_);
  int64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  int ends_[2] = {-1, -1};
  int other_host_ = -1;
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> dropped_ = 0;
  std::atomic<int64_t> overtook_[2] = {0, 0};
  std::thread carriers_[2];
};

}  // namespace attnd
