#include "server/landing.h"

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/non_temporal_copy.h"
#include "server/residual.h"
#include "server/status_details.h"

namespace attnd {
namespace {

// From here on a call's inputs would push each other out of a core's cache before the engine reads
// them.
constexpr int64_t kCacheBytes = int64_t{2} << 20;

constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);

absl::Status NoGap(int64_t bytes) {
  std::string wanted = absl::StrCat(bytes);
  return WithRetryAfter(
      Failure(absl::StatusCode::kUnavailable, reason::kMemoryPressure,
              absl::StrCat("full now: no ", wanted, " bytes of staging memory in one piece"),
              {{"wanted", wanted}}),
      kRetryDelay);
}

void SetPlaces(AdmittedCall& call, StagingBlock block) {
  StagedTensors& staged = call.staged();
  if (call.call().residual() != nullptr) staged.at = call.call().residual()->places();
  staged.outputs = block.SplitOff(call.input_bytes() + call.workspace_bytes());
  staged.inputs = std::move(block);
  std::byte* next = staged.inputs.data();
  auto place = [&](Tensor tensor, int64_t bytes) {
    bool in_place = call.call().InPlace(tensor);
    staged.at[tensor] = in_place ? call.call().shared(tensor) : next;
    if (!in_place) next += AlignedSize(bytes);
  };
  for (const TensorSource& input : call.call().inputs()) place(input.tensor, input.range.size);
  staged.workspace = call.workspace_bytes() == 0 ? nullptr : next;
  next = staged.outputs.data();
  for (const TensorSize& output : OutputsOf(call.call().problem(), call.call().direction())) {
    place(output.tensor, output.bytes);
  }
}

}  // namespace

absl::Status TakePlaces(AdmittedCall& call, StagingPool& staging, MemoryReclaimer* leases) {
  int64_t bytes = call.input_bytes() + call.workspace_bytes() + call.output_bytes();
  std::optional<StagingBlock> block = staging.TryAcquire(bytes);
  while (!block.has_value() && leases != nullptr && leases->EvictOne(kHostMemory)) {
    block = staging.TryAcquire(bytes);
  }
  if (!block.has_value()) return NoGap(bytes);
  SetPlaces(call, *std::move(block));
  return absl::OkStatus();
}

int64_t Land(AdmittedCall& admitted) {
  AttentionCall& call = admitted.call();
  int64_t landed = 0;
  for (const TensorSource& input : call.inputs()) {
    if (call.InPlace(input.tensor)) continue;
    std::byte* to = admitted.staged()[input.tensor];
    landed += input.range.size;
    if (const std::byte* shared = call.shared(input.tensor); shared != nullptr) {
      LandPiece(to, {reinterpret_cast<const uint8_t*>(shared), size_t(input.range.size)},
                call.input_bytes());
      continue;
    }
    call.message().ForEachPiece(input.range, [&](absl::Span<const uint8_t> piece) {
      LandPiece(to, piece, call.input_bytes());
      to += piece.size();
    });
  }
  call.DropMessage();
  return landed;
}

void LandPiece(std::byte* to, absl::Span<const uint8_t> from, int64_t call_bytes) {
  const auto* bytes = reinterpret_cast<const std::byte*>(from.data());
  if (call_bytes > kCacheBytes) {
    CopyNonTemporal(to, bytes, from.size());
  } else {
    std::memcpy(to, bytes, from.size());
  }
}

}  // namespace attnd
