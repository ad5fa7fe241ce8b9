#include "client/call/shared_tensors.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/non_temporal_copy.h"
#include "base/round_up.h"

namespace attnd {
namespace {

v1::TensorName InputName(int field_number) {
  using Request = v1::BackwardRequest;  // its field numbers are forward's too
  switch (field_number) {
    case Request::kMaskDataFieldNumber:
      return v1::TENSOR_NAME_MASK_DATA;
    case Request::kMaskBitsFieldNumber:
      return v1::TENSOR_NAME_MASK_BITS;
    case Request::kBiasFieldNumber:
      return v1::TENSOR_NAME_BIAS;
    case Request::kKFieldNumber:
      return v1::TENSOR_NAME_K;
    case Request::kVFieldNumber:
      return v1::TENSOR_NAME_V;
    case Request::kQFieldNumber:
      return v1::TENSOR_NAME_Q;
    case Request::kLseFieldNumber:
      return v1::TENSOR_NAME_LSE;
    case Request::kOFieldNumber:
      return v1::TENSOR_NAME_O;
    case Request::kDOFieldNumber:
      return v1::TENSOR_NAME_D_O;
    default:
      return v1::TENSOR_NAME_D_LSE;
  }
}

v1::TensorName OutputName(Direction direction, int field_number) {
  if (direction == Direction::kForward) {
    return field_number == v1::ForwardResponse::kOFieldNumber ? v1::TENSOR_NAME_O
                                                              : v1::TENSOR_NAME_LSE;
  }
  using Reply = v1::BackwardResponse;
  switch (field_number) {
    case Reply::kDKFieldNumber:
      return v1::TENSOR_NAME_D_K;
    case Reply::kDVFieldNumber:
      return v1::TENSOR_NAME_D_V;
    case Reply::kDQFieldNumber:
      return v1::TENSOR_NAME_D_Q;
    case Reply::kDBiasFieldNumber:
      return v1::TENSOR_NAME_D_BIAS;
    default:
      return v1::TENSOR_NAME_D_SINK;
  }
}

// Past the caches where the tensor is larger than they are: the daemon reads it on another core.
void GatherInto(std::byte* to, const StridedRuns& runs, const std::byte* tensor) {
  const bool large = runs.total_bytes() >= RunCursor::kCacheBytes;
  for (int64_t run = 0; run < runs.run_count(); ++run) {
    const std::byte* from = tensor + runs.RunOffset(run);
    large ? CopyNonTemporal(to, from, static_cast<size_t>(runs.run_bytes))
          : static_cast<void>(std::memcpy(to, from, static_cast<size_t>(runs.run_bytes)));
    to += runs.run_bytes;
  }
}

}  // namespace

void SharedTensors::AddInput(v1::TensorName name, const StridedRuns& runs, const void* tensor) {
  input_bytes_ += runs.total_bytes();
  tensors_.push_back({name, runs, tensor, false});
}

void SharedTensors::AddOutput(v1::TensorName name, const StridedRuns& runs, void* tensor) {
  tensors_.push_back({name, runs, tensor, true});
}

bool SharedTensors::Place() {
  int64_t block_bytes = 0;
  for (Tensor& tensor : tensors_) {
    std::optional<SharedPlaceOf> place;
    if (tensor.runs.run_count() == 1) {
      place = memory_.Find(static_cast<const std::byte*>(tensor.tensor) + tensor.runs.offset,
                           tensor.runs.run_bytes);
    }
    if (place.has_value()) {
      Name(tensor, *place);
    } else {
      tensor.at = block_bytes;
      block_bytes += RoundUp(tensor.runs.total_bytes(), SharedMemory::kAlignment);
    }
  }
  if (block_bytes > 0) {
    block_ = memory_.Allocate(block_bytes);
    if (block_ == nullptr) return false;
    std::optional<SharedPlaceOf> block = memory_.Find(block_.get(), block_bytes);
    if (!block.has_value()) return false;  // the daemon went away meanwhile
    for (const Tensor& tensor : tensors_) {
      if (tensor.at < 0) continue;
      Name(tensor, {block->region, block->offset + static_cast<uint64_t>(tensor.at)});
      if (tensor.output) continue;
      GatherInto(block_.get() + tensor.at, tensor.runs,
                 static_cast<const std::byte*>(tensor.tensor));
      copied_bytes_ += tensor.runs.total_bytes();
    }
  }
  message_.set_use(memory_.NewUse());
  return true;
}

void SharedTensors::Name(const Tensor& tensor, const SharedPlaceOf& place) {
  auto& regions = *message_.mutable_region();
  auto known = std::find(regions.begin(), regions.end(), place.region);
  v1::SharedTensor& named = *message_.add_tensor();
  named.set_region(static_cast<uint32_t>(known - regions.begin()));
  if (known == regions.end()) message_.add_region(place.region);
  named.set_name(tensor.name);
  named.set_offset(place.offset);
  named.set_size(static_cast<uint64_t>(tensor.runs.total_bytes()));
}

void SharedTensors::Land() {
  for (const Tensor& tensor : tensors_) {
    if (!tensor.output || tensor.at < 0) continue;
    RunCursor cursor(tensor.runs, static_cast<std::byte*>(const_cast<void*>(tensor.tensor)));
    cursor.Scatter(block_.get() + tensor.at, tensor.runs.total_bytes());
  }
}

void SharedRequest::AddPayload(int field_number, const StridedRuns& runs, const void* tensor) {
  AddInput(InputName(field_number), runs, tensor);
}

void SharedRequest::AddOutput(const ReplyPayload& output) {
  SharedTensors::AddOutput(OutputName(direction_, output.field_number), output.runs, output.tensor);
}

}  // namespace attnd
