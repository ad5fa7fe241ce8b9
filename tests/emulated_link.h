// EmulatedLink: two hosts on one machine, each a network namespace, and a link between them with a
// delay, a rate, losses and reordering. Both ends are TUN devices whose packets this process
// carries across, so that real TCP connections meet it, and no kernel module is needed.
//
//     EmulatedLink link;                                     // its maker's thread is host A
//     link.OnOtherHost([&] { start the daemon, listening on link.other_address() });
//     link.Change({.delay = absl::Milliseconds(10)});
//
// Hosts hand over and take segments of up to 64 KiB, as with a network card that cuts and joins
// packets itself: a link of 10 Gbit/s is 19,000 of them a second each way. What the line does, it
// does to packets of its MTU: rate, and losses, which are cut out of a segment.
//
// Needs root and /dev/net/tun: see Supported. One for a process, made before anything else starts a
// thread: threads live on the host on which their maker was. Threads: one uses it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/time.h"

namespace attnd {

class EmulatedLink {
 public:
  static constexpr int kMtu = 9000;

  // Of each direction.
  struct Options {
    absl::Duration delay = absl::ZeroDuration();  // half of the round trip
    double bits_per_second = 0;                   // 0: as fast as packets can be carried
    double loss = 0;                              // probability that a packet is dropped
    double reorder = 0;                           // probability that a segment overtakes others
    int64_t queue_bytes = int64_t{32} << 20;      // that wait for the line; beyond: dropped
    uint64_t seed = 1;
  };

  // Whether this process may make namespaces and TUN devices.
  static bool Supported();

  EmulatedLink();
  ~EmulatedLink();
  EmulatedLink(const EmulatedLink&) = delete;
  EmulatedLink& operator=(const EmulatedLink&) = delete;

  // From the next packet on.
  void Change(const Options& options);

  const char* other_address() const { return "10.77.0.2"; }

  // Runs `work` on a thread of the other host; processes and threads that it starts live there.
  void OnOtherHost(const std::function<void()>& work);

  int64_t dropped() const;
  int64_t overtook() const;

 private:
  class Direction;

  int ends_[2] = {-1, -1};
  int other_host_ = -1;
  std::unique_ptr<Direction> directions_[2];
};

// A segment as a TUN device with virtio headers gives it: the header, an IPv4 packet.
using LinkSegment = std::vector<char>;

// How many packets of the MTU it is on the line.
int64_t PacketsOf(const LinkSegment& segment);
// What is left of it without its packets `lost`, ascending: nothing, itself or pieces of it.
std::vector<LinkSegment> WithoutPackets(const LinkSegment& segment,
                                        const std::vector<int64_t>& lost);

}  // namespace attnd
