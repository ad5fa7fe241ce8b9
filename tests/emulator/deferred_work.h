// Work that happens when somebody waits for it, as late as it may, in groups. Errors: none.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

namespace attnd::emulator {

class DeferredWork {
 public:
  void Add(std::function<void()> work) { work_.emplace_back(group_, std::move(work)); }
  // Closes a group.
  void Commit() { ++group_; }
  // Does all but the last `left` closed groups. Each piece leaves the queue before it is done.
  void Finish(int left) {
    while (!work_.empty() && work_.front().first < group_ - left) {
      const std::function<void()> work = std::move(work_.front().second);
      work_.pop_front();
      work();
    }
  }
  bool empty() const { return work_.empty(); }

 private:
  std::deque<std::pair<int64_t, std::function<void()>>> work_;
  int64_t group_ = 0;  // the open one
};

}  // namespace attnd::emulator
