#include "server/admission/staging_copy.h"

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/non_temporal_copy.h"
#include "base/status_macros.h"
#include "server/admission/residual.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

// Larger inputs would evict each other from a core's cache before the engine reads them.
constexpr int64_t kCacheBytes = int64_t{2} << 20;

constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);

absl::Status NoGap(int64_t bytes) {
  std::string wanted = absl::StrCat(bytes);
  return WithRetryAfter(
      Failure(absl::StatusCode::kUnavailable, reason::kMemoryPressure,
              absl::StrCat("full now: no ", wanted,
                           " bytes of staging memory in one piece; wait, or try another replica"),
              {{"wanted", wanted}}),
      kRetryDelay);
}

void SetPlaces(AdmittedCall& admitted, StagingBlock block) {
  const AttentionCall& call = admitted.call();
  const CallMemory& memory = admitted.memory();
  StagedTensors& staged = admitted.staged();
  staged.outputs = block.SplitOff(admitted.input_bytes() + admitted.workspace_bytes());
  staged.inputs = std::move(block);
  std::byte *input = staged.inputs.data(), *output = staged.outputs.data();
  staged.at.Reserve(call.tensors().size());
  for (const TensorSpec& tensor : call.tensors()) {
    if (tensor.role == TensorUse::kKept) {
      staged.at.Add(tensor.id, memory.residual->places()[tensor.id]);
    } else if (admitted.InPlace(tensor)) {
      staged.at.Add(tensor.id, memory.shared[tensor.id]);
    } else {
      std::byte*& next = tensor.role == TensorUse::kInput ? input : output;
      staged.at.Add(tensor.id, next);
      next += AlignedSize(tensor.bytes);
    }
  }
  staged.workspace = admitted.workspace_bytes() == 0 ? nullptr : input;
}

}  // namespace

absl::StatusOr<StagingBlock> TakeBlock(int64_t bytes, StagingPool& staging,
                                       MemoryReclaimer* leases) {
  std::optional<StagingBlock> block = staging.TryAcquire(bytes);
  while (!block.has_value() && leases != nullptr && leases->EvictOne(kHostMemory)) {
    block = staging.TryAcquire(bytes);
  }
  if (!block.has_value()) return NoGap(bytes);
  return *std::move(block);
}

absl::Status TakePlaces(AdmittedCall& call, StagingPool& staging, MemoryReclaimer* leases) {
  const int64_t bytes = call.input_bytes() + call.workspace_bytes() + call.output_bytes();
  ASSIGN_OR_RETURN(StagingBlock block, TakeBlock(bytes, staging, leases));
  SetPlaces(call, std::move(block));
  return absl::OkStatus();
}

int64_t Land(AdmittedCall& admitted) {
  AttentionCall& call = admitted.call();
  int64_t landed = 0;
  for (const TensorSpec& tensor : call.tensors()) {
    if (tensor.role != TensorUse::kInput || admitted.InPlace(tensor)) continue;
    std::byte* to = admitted.staged()[tensor.id];
    landed += tensor.bytes;
    if (tensor.region != kNoRegion) {
      const auto* shared = reinterpret_cast<const uint8_t*>(admitted.memory().shared[tensor.id]);
      LandPiece(to, {shared, static_cast<size_t>(tensor.bytes)}, call.input_bytes());
      continue;
    }
    const ByteRange range = {static_cast<int64_t>(tensor.offset), tensor.bytes};
    call.message().ForEachPiece(range, [&](absl::Span<const uint8_t> piece) {
      LandPiece(to, piece, call.input_bytes());
      to += piece.size();
    });
  }
  call.DropMessage();
  return landed;
}

int64_t LandOutputs(const AdmittedCall& admitted) {
  int64_t landed = 0;
  for (const TensorSpec& tensor : admitted.call().tensors()) {
    if (tensor.role != TensorUse::kOutput || tensor.region == kNoRegion) continue;
    if (admitted.InPlace(tensor)) continue;
    const auto* from = reinterpret_cast<const uint8_t*>(admitted.staged()[tensor.id]);
    LandPiece(admitted.memory().shared[tensor.id], {from, static_cast<size_t>(tensor.bytes)},
              admitted.call().output_bytes());
    landed += tensor.bytes;
  }
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
