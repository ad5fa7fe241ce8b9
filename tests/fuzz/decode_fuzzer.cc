// Any bytes → a Status, never a crash: libFuzzer's entry. The first byte chooses the direction and
// the size of the slices in which the rest arrives.
//
//   tests/fuzz/fuzz_decode.sh -max_total_time=60      replay of the corpus:
//   //tests/fuzz:decode_corpus_test
#include <cstddef>
#include <cstdint>
#include <string>

#include "attention/cost.h"
#include "base/check.h"
#include "server/call/status_details.h"
#include "server/wire/decode.h"
#include "tests/fixtures/sliced_buffer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  size_t slice_bytes = size_t{1} << ((data[0] >> 1) % 16);
  const std::string message(reinterpret_cast<const char*>(data) + 1, size - 1);
  auto direction = data[0] & 1 ? attnd::Direction::kBackward : attnd::Direction::kForward;
  static const attnd::RealClock clock;
  static attnd::MaskTable masks({.bytes = 1 << 20, .bytes_of_caller = 1 << 20}, clock);
  auto call = attnd::Decoder::Decode(attnd::MessageBytes(attnd::InSlicesOf(message, slice_bytes)),
                                     direction, {masks, "caller"}, attnd::AnyRoom);
  if (!call.ok()) {
    // The form of an error says whose fault it is, and is complete.
    CHECK(call.status().code() == absl::StatusCode::kInvalidArgument ||
          call.status().code() == absl::StatusCode::kFailedPrecondition ||
          call.status().code() == absl::StatusCode::kOutOfRange)  // of a mask
        << call.status().message();
    CHECK(!attnd::ReasonOf(call.status()).empty());
    return 0;
  }
  int64_t bytes = 0;
  for (const attnd::TensorSpec& tensor : call->tensors()) {
    if (tensor.role != attnd::TensorUse::kInput) continue;
    const attnd::ByteRange range = {static_cast<int64_t>(tensor.offset), tensor.bytes};
    call->message().ForEachPiece(range, [&](absl::Span<const uint8_t> piece) {
      bytes += static_cast<int64_t>(piece.size());
    });
  }
  CHECK(bytes == call->input_bytes());
  if (call->shared_request() == nullptr) {  // whose work is bounded once its memory is found
    CHECK(attnd::Flops(call->problem(), direction) >= 0);
  }
  return 0;
}
