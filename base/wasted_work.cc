#include "base/wasted_work.h"

#include <algorithm>

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
constexpr uint8_t kEndStream = 1, kAck = 1;

}  // namespace

void FrameBudget::Grow(absl::Time now) {
  Add(per_second_ * absl::ToDoubleSeconds(std::max(now - grown_at_, absl::ZeroDuration())));
  grown_at_ = now;
}

WastedWork::WastedWork(const Limits& limits, absl::Time now)
    : limits_(limits), budget_(0, limits.frames_per_second, now) {}

void WastedWork::Feed(absl::Span<const uint8_t> bytes) {
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
  const uint8_t flags = header_[4];
  const bool ends_call = (frame_type_ == kData || frame_type_ == kHeaders) && (flags & kEndStream);
  const bool is_ack = (frame_type_ == kSettings || frame_type_ == kPing) && (flags & kAck);
  const bool has_use = frame_type_ == kWindowUpdate || frame_type_ == kContinuation || is_ack ||
                       (frame_type_ == kData && (frame_left_ > 0 || ends_call));
  if (!has_use) budget_.Add(-1);
  if (frame_type_ == kHeaders) {
    headers_ = 0;
    ++open_calls_;
  }
  if (frame_type_ == kResetStream && open_calls_ > 0) --open_calls_;
  if (ends_call) EndCall();
}

// Of a call that was not begun nothing is given back.
void WastedWork::EndCall() {
  ends_call_ = true;
  if (open_calls_ == 0) return;
  --open_calls_;
  budget_.Add(1);
}

void WastedWork::TakePayload(int64_t bytes) {
  frame_left_ -= bytes;
  if (frame_type_ == kData) {
    has_data_ = true;
    data_bytes_ += bytes;
    // The end of what was worth a read is too: somebody may wait for it.
    if (frame_left_ == 0 && frame_bytes_ >= kEnoughBytes) data_bytes_ += kCrumbBytes;
  }
  if (frame_type_ != kHeaders && frame_type_ != kContinuation) return;
  const int64_t before = std::max(headers_, limits_.header_bytes);
  headers_ += bytes;
  const int64_t beyond = std::max(headers_, limits_.header_bytes) - before;
  budget_.Add(-static_cast<double>(beyond) / kFrameBytes);
}

WastedWork::Hold WastedWork::TakeCrumbs(absl::Time now) {
  constexpr int64_t kFull = kMostCrumbs * kCrumbBytes;
  if (has_data_) crumb_bytes_ = std::min(crumb_bytes_ + data_bytes_ - kCrumbBytes, kFull);
  if (ends_call_) crumb_bytes_ = kFull;
  const bool too_many = has_data_ && crumb_bytes_ < 0;
  crumb_bytes_ = std::max<int64_t>(crumb_bytes_, 0);
  data_bytes_ = 0;
  has_data_ = ends_call_ = false;
  if (!too_many) return {};
  const bool lacks_less = frame_type_ == kData && frame_bytes_ >= kEnoughBytes && frame_left_ > 0;
  // Of those who began together each is let go at another time.
  const auto chance = static_cast<double>(absl::ToUnixNanos(now) % 1000) / 1000;
  return {.time = limits_.crumb_hold * ((2 + chance) / 3),
          .until_bytes = lacks_less ? std::min(frame_left_, kEnoughBytes) : kEnoughBytes};
}

}  // namespace attnd
