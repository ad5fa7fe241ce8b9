#include "base/wasted_work.h"

#include <algorithm>
#include <utility>

#include "absl/strings/string_view.h"

namespace attnd {
namespace {

constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
enum Type : uint8_t {
  kData = 0,
  kHeaders = 1,
  kResetStream = 3,
  kSettings = 4,
  kPing = 6,
  kWindowUpdate = 8,
  kContinuation = 9
};
constexpr uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4;

}  // namespace

void FrameBudget::Grow(absl::Time now) {
  Add(per_second_ * absl::ToDoubleSeconds(std::max(now - grown_at_, absl::ZeroDuration())));
  grown_at_ = now;
}

WastedWork::WastedWork(const Limits& limits, absl::Time now)
    : limits_(limits), budget_(0, limits.frames_per_second, now), grown_at_(now) {}

void WastedWork::Feed(absl::Span<const uint8_t> bytes) {
  bytes_ += static_cast<int64_t>(bytes.size());
  Follow(bytes);
}

void WastedWork::FeedEncrypted(int64_t bytes) {
  bytes_ += bytes;
  unexplained_ += bytes;
}

// A record has some bytes of its own, more than a small frame in it: twice, that is.
void WastedWork::FeedDecrypted(absl::Span<const uint8_t> bytes) {
  unexplained_ = std::max<int64_t>(unexplained_ - 2 * static_cast<int64_t>(bytes.size()), 0);
  Follow(bytes);
}

void WastedWork::TakeUnexplained() {
  budget_.Add(-static_cast<double>(unexplained_ - kRecordBytes) / kFrameBytes);
  unexplained_ = kRecordBytes;
}

void WastedWork::Follow(absl::Span<const uint8_t> bytes) {
  while (!bytes.empty() && is_http2_) {
    if (frame_left_ > 0) {
      const int64_t part = std::min<int64_t>(frame_left_, static_cast<int64_t>(bytes.size()));
      TakePayload(part);
      bytes.remove_prefix(static_cast<size_t>(part));
      continue;
    }
    TakeHeaderByte(bytes.front());
    bytes.remove_prefix(1);
  }
}

void WastedWork::Skip(int64_t bytes) {
  bytes_ += bytes;
  if (bytes > 0) TakePayload(bytes);
}

void WastedWork::TakeHeaderByte(uint8_t byte) {
  if (preface_ < kPrefaceBytes) {
    is_http2_ = byte == static_cast<uint8_t>(kPreface[static_cast<size_t>(preface_++)]);
    return;
  }
  header_[header_got_++] = byte;
  if (header_got_ < kFrameHeaderBytes) return;
  header_got_ = 0;
  BeginFrame();
}

void WastedWork::BeginFrame() {
  frame_bytes_ = frame_left_ = header_[0] << 16 | header_[1] << 8 | header_[2];
  frame_type_ = header_[3];
  frame_flags_ = header_[4];
  const bool is_ack = (frame_type_ == kSettings || frame_type_ == kPing) && (frame_flags_ & kAck);
  if (is_ack || frame_type_ == kWindowUpdate) {
    --answers_;
    answers_now_ = true;
    acknowledges_ |= frame_type_ == kSettings;
    return;
  }
  budget_.Add(-CostOfFrame());
  if (frame_type_ == kHeaders) {
    headers_ = 0;
    ++open_calls_;
    ++(acknowledges_ ? calls_after_ : calls_before_);
  }
  if (frame_type_ == kResetStream && open_calls_ > 0) --open_calls_;
  if ((frame_type_ == kData || frame_type_ == kHeaders) && (frame_flags_ & kEndStream)) EndCall();
}

double WastedWork::CostOfFrame() const {
  const bool is_data = frame_type_ == kData, is_headers = frame_type_ == kContinuation;
  if (!is_data && !is_headers) return 1;
  if (frame_flags_ & (is_data ? kEndStream : kEndHeaders)) return 0;
  if (frame_bytes_ == 0) return 1;
  return frame_bytes_ < kFrameBytes ? kPieceCost : 0;
}

// The end of no call costs too.
void WastedWork::EndCall() {
  ends_call_ = open_calls_ > 0;
  budget_.Add(ends_call_ ? 1 : -1);
  if (!ends_call_) return;
  --open_calls_;
  answers_ = std::min(answers_ + kAnswersToACall, kMostAnswers);
}

// From the acknowledgement on none are.
void WastedWork::TakeUnlimitedCalls(bool is_limited) {
  const int64_t calls = calls_before_ + (is_limited ? 0 : calls_after_);
  budget_.Add(-kUnlimitedCall * static_cast<double>(calls));
  calls_before_ = calls_after_ = 0;
  acknowledges_ = false;
  is_limited_ = is_limited;
}

// What nothing explains costs.
void WastedWork::TakeAnswers(int64_t sent) {
  const int64_t more = std::max<int64_t>(sent - answered_, 0) / kAnsweredBytes;
  answered_ += more * kAnsweredBytes;
  answers_ += std::min(more, kMostAnswers);
  if (answers_ >= 0) return;
  budget_.Add(static_cast<double>(answers_));
  answers_ = 0;
  answers_now_ = false;
}

void WastedWork::TakePayload(int64_t bytes) {
  frame_left_ -= bytes;
  // The end of what was worth a read is too: somebody may wait for it.
  const bool is_large_data = frame_type_ == kData && frame_bytes_ >= kEnoughBytes;
  if (is_large_data && frame_left_ == 0) bytes_ += kCrumbBytes;
  if (frame_type_ != kHeaders && frame_type_ != kContinuation) return;
  const int64_t before = std::max(headers_, limits_.header_bytes);
  headers_ += bytes;
  const int64_t beyond = std::max(headers_, limits_.header_bytes) - before;
  budget_.Add(-static_cast<double>(beyond) / kFrameBytes);
}

WastedWork::Hold WastedWork::TakeCrumbs(absl::Time now) {
  constexpr double kFull = kMostCrumbs * kCrumbBytes;
  const double waited = absl::FDivDuration(now - grown_at_, kCrumbTime);
  grown_at_ = now;
  const int64_t bytes = std::exchange(bytes_, 0);
  const double more = static_cast<double>(bytes - kCrumbBytes) + waited * kCrumbBytes;
  crumb_bytes_ += std::exchange(answers_now_, false) ? std::max(more, 0.0) : more;
  if (std::exchange(ends_call_, false)) crumb_bytes_ = kFull;
  const bool too_many = is_http2_ && crumb_bytes_ < 0;
  crumb_bytes_ = std::clamp(crumb_bytes_, 0.0, kFull);
  if (!too_many) return {};
  const bool lacks_less = frame_type_ == kData && frame_bytes_ >= kEnoughBytes && frame_left_ > 0;
  // Of those who began together each is let go at another time.
  const auto chance = static_cast<double>(absl::ToUnixNanos(now) % 1000) / 1000;
  return {.time = limits_.crumb_hold * ((2 + chance) / 3),
          .until_bytes = lacks_less ? std::min(frame_left_, kEnoughBytes) : kEnoughBytes};
}

}  // namespace attnd
