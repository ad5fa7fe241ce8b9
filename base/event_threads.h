// EventThreads: how many threads drive gRPC's callback API in this process.
//
// gRPC 1.51 takes half of the machine's cores, 2 to 16, and has no setting for it. Each event wakes
// the next of them, so that many cost small calls twice the time (docs/PERFORMANCE.md, A small
// call). It asks gpr_cpu_num_cores() when the first server or channel with callbacks is made in
// the process; that function is replaced here, and answers as gRPC's own except on a thread that
// holds an EventThreads. Where gRPC is linked statically this has no effect.
#pragma once

namespace attnd {

class EventThreads {
 public:
  static constexpr int kLeast = 2, kMost = 16;  // gRPC's own bounds

  // While it lives, on this thread; 0: as gRPC decides.
  explicit EventThreads(int count);
  ~EventThreads();
  EventThreads(const EventThreads&) = delete;
  EventThreads& operator=(const EventThreads&) = delete;
};

}  // namespace attnd
