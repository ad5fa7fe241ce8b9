// CallPace: how long one module's calls take, learned from those that have ended. Any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace attnd {

enum class PacedCall : uint8_t { kForward, kBackward, kStep };

class CallPace {
 public:
  // 0 before the first call of the kind.
  double SecondsFor(PacedCall kind, int64_t rows) const {
    return pace_[static_cast<size_t>(kind)].load() * static_cast<double>(rows);
  }
  // A call took `seconds` of its devices. Later calls count more than earlier ones; of two at a
  // time one may be lost.
  void Took(PacedCall kind, int64_t rows, double seconds) {
    std::atomic<double>& pace = pace_[static_cast<size_t>(kind)];
    const double before = pace.load(), now = seconds / static_cast<double>(rows);
    pace = before == 0 ? now : before + kWeight * (now - before);
  }

 private:
  static constexpr double kWeight = 0.3;       // of the last call
  std::array<std::atomic<double>, 3> pace_{};  // seconds a row
};

}  // namespace attnd
