#include "client/cli/progress_bar.h"

#include <algorithm>
#include <iostream>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace attnd {
namespace {

constexpr int kBarWidth = 30;
constexpr absl::Duration kQuiet = absl::Seconds(1);
constexpr absl::Duration kInterval = absl::Milliseconds(100);

}  // namespace

ProgressBar::ProgressBar(std::string label, int64_t total, bool enabled)
    : label_(std::move(label)),
      total_(std::max<int64_t>(total, 1)),
      enabled_(enabled),
      start_(absl::Now()),
      last_shown_(absl::InfinitePast()) {}

ProgressBar::~ProgressBar() {
  absl::MutexLock lock(&mutex_);
  if (shown_) std::cerr << "\r\033[K" << std::flush;
}

void ProgressBar::Show(int64_t done) {
  if (!enabled_) return;
  absl::MutexLock lock(&mutex_);
  absl::Time now = absl::Now();
  if (now - start_ < kQuiet || now - last_shown_ < kInterval) return;
  last_shown_ = now;
  shown_ = true;
  int filled = static_cast<int>(std::min<int64_t>(kBarWidth, done * kBarWidth / total_));
  std::string bar = std::string(filled, '#') + std::string(kBarWidth - filled, '.');
  double left = done == 0 ? 0
                          : absl::ToDoubleSeconds(now - start_) *
                                static_cast<double>(total_ - done) / static_cast<double>(done);
  std::cerr << absl::StrFormat("\r\033[K%s [%s] %d/%d, %.0f s left", label_, bar, done, total_,
                               left)
            << std::flush;
}

}  // namespace attnd
