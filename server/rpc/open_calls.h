// OpenCalls: how many calls have arrived and not ended, the writing of their answers included, so
// that a drain can wait for none. Any thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace attnd {

class OpenCalls {
 public:
  // One call, while it lives. `calls` outlives it.
  class Call {
   public:
    explicit Call(OpenCalls& calls) : calls_(calls) { ++calls_.count_; }
    ~Call() { --calls_.count_; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    OpenCalls& calls_;
  };

  int64_t count() const { return count_; }

 private:
  std::atomic<int64_t> count_{0};
};

}  // namespace attnd
