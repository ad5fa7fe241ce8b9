#include "kernels/layers/cuda/cuda_device.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "attention/shard.h"
#include "base/check.h"
#include "base/round_up.h"
#include "base/status_macros.h"
#include "kernels/cuda/layout/staging.h"
#include "kernels/layers/cuda/dense_tensors.h"
#include "kernels/layers/cuda/padded_attention.h"
#include "kernels/layers/cuda/step_descriptor.h"
#include "modules/arena.h"

namespace attnd {

CudaDevice::CudaDevice(cuda::CudaBackend& engine, HoldDeviceMemory hold, const Nccl* nccl)
    : engine_(engine),
      hold_(std::move(hold)),
      queue_(engine.device()),
      siblings_(engine.device().multiprocessors()),
      gradients_(engine.device().multiprocessors()) {
  if (nccl == nullptr) return;
  replica_sums_ = std::make_unique<NcclSums>(
      *nccl, engine.device(), *this, hold_,
      [this](const cuda::DeviceMemory* memory) { queue_.SetBeside(memory); });
}

// ---- Memory.

int64_t CudaDevice::PackedBytes(const WeightMatrix& matrix) const {
  if (matrix.weight.element == matrix.operand) return 0;
  return matrix.rows * matrix.columns * ElementBytes(matrix.operand);
}

absl::StatusOr<std::byte*> CudaDevice::Allocate(int64_t bytes) {
  CHECK(memory_ == nullptr);
  CHECK(bytes % kTensorAlignment == 0) << bytes;  // descriptors lie at its end
  if (hold_ != nullptr) {
    ASSIGN_OR_RETURN(held_, hold_(bytes));
  }
  memory_ = engine_.device().Hold(bytes);
  if (memory_ == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("memory: the GPU has no ", bytes, " bytes in one piece just now"));
  }
  CHECK(memory_->address() % kArenaAlignment == 0) << memory_->address();
  const int64_t own = RoundUp(OwnBytes(), kArenaAlignment);
  const cuda::DevicePart part{memory_.get(), bytes - own, OwnBytes()};
  queue_.SetMemory(part);
  ASSIGN_OR_RETURN(const std::unique_ptr<cuda::DeviceLaunch> launch,
                   engine_.device().BeginIn(part, {}));
  RETURN_IF_ERROR(launch->SetZero(memory_->address(), bytes));
  RETURN_IF_ERROR(launch->Finish().status());
  return reinterpret_cast<std::byte*>(memory_->address());
}

cuda::DevicePart CudaDevice::PartAt(const std::byte* begin, int64_t bytes) const {
  const auto at = static_cast<int64_t>(reinterpret_cast<uint64_t>(begin) - memory_->address());
  return {memory_.get(), at, bytes};
}

absl::Status CudaDevice::Put(ElementType from, const void* host, Tensor to, int64_t count) {
  auto* next = const_cast<std::byte*>(static_cast<const std::byte*>(host));
  const int64_t size = ElementBytes(from);
  LaunchAll();
  if (from == to.element) {
    return queue_.Upload(
        {.device = reinterpret_cast<uint64_t>(to.data), .host = next, .bytes = count * size});
  }
  const int64_t most = LaunchQueue::kStagingBytes / size;
  const ConstTensor staged{reinterpret_cast<const void*>(queue_.staging()), from};
  for (int64_t first = 0; first < count; first += most) {
    const int64_t part = std::min(most, count - first);
    RETURN_IF_ERROR(queue_.Upload(
        {.device = queue_.staging(), .host = next + first * size, .bytes = part * size}));
    NumbersDesc copy = NumbersOf(kNumbersCopy, staged, to, part);
    copy.out = Behind(copy.out, first);
    AddNumbers(copy);
    RETURN_IF_ERROR(queue_.Flush());
  }
  return absl::OkStatus();
}

absl::Status CudaDevice::Get(ConstTensor from, ElementType to, void* host, int64_t count) {
  auto* next = static_cast<std::byte*>(host);
  const int64_t size = ElementBytes(to);
  LaunchAll();
  if (from.element == to) {
    return queue_.Download(
        {.device = reinterpret_cast<uint64_t>(from.data), .host = next, .bytes = count * size});
  }
  const int64_t most = LaunchQueue::kStagingBytes / size;
  const Tensor staged{reinterpret_cast<void*>(queue_.staging()), to};
  for (int64_t first = 0; first < count; first += most) {
    const int64_t part = std::min(most, count - first);
    NumbersDesc desc = NumbersOf(kNumbersCopy, from, staged, part);
    desc.a = Behind(desc.a, first);
    AddNumbers(desc);
    RETURN_IF_ERROR(queue_.Download(
        {.device = queue_.staging(), .host = next + first * size, .bytes = part * size}));
    RETURN_IF_ERROR(queue_.Flush());
  }
  return absl::OkStatus();
}

void CudaDevice::SetZero(void* to, int64_t bytes) {
  const ElementType element = bytes % 4 == 0 ? ElementType::kFloat32 : ElementType::kFloat16;
  AddNumbers(NumbersOf(kNumbersZero, {}, {to, element}, bytes / ElementBytes(element)));
}

void CudaDevice::Copy(const void* from, void* to, int64_t bytes) {
  const ElementType element = bytes % 4 == 0 ? ElementType::kFloat32 : ElementType::kFloat16;
  AddNumbers(
      NumbersOf(kNumbersCopy, {from, element}, {to, element}, bytes / ElementBytes(element)));
}

// ---- Attention.

int64_t CudaDevice::AttentionBytes(const Problem& one_sequence, Direction direction) const {
  return PaddedBytes(one_sequence, direction) + GroupBytes(engine_, one_sequence, direction);
}

// Without masks in the queue. With one the bits and lists of its launch go up with it, and it is
// waited for.
template <class Call>
absl::Status CudaDevice::RunAttention(const Call& call, const cuda::DevicePart& arena) {
  if (!cuda::CudaBackend::HasMask(*call.problem)) {
    ASSIGN_OR_RETURN(cuda::InPlaceCall planned, engine_.PlanInPlace(call, arena));
    if (planned.arena_bytes() <= arena.bytes &&
        planned.constant_bytes() <= LaunchQueue::kMostConstants) {
      return QueueAttention(planned, call.stop);
    }
  }
  LaunchAll();
  RETURN_IF_ERROR(queue_.Flush());
  return engine_.RunInPlace(call, arena);
}

absl::Status CudaDevice::QueueAttention(cuda::InPlaceCall& call, const std::stop_token& stop) {
  for (const cuda::DeviceRange& range : call.zeroed()) {
    SetZero(reinterpret_cast<void*>(range.address), range.bytes);
  }
  const uint64_t place = queue_.PlaceFor(call.constant_bytes());
  ASSIGN_OR_RETURN(const std::vector<std::byte> constants,
                   call.ConstantsAt(place, engine_.device()));
  queue_.Constants(constants.data(), static_cast<int64_t>(constants.size()));
  for (int slice = 0; slice < call.slices(); ++slice) {
    if (stop.stop_requested()) return absl::CancelledError("stopped");
    queue_.AddSteps(call.Slice(slice), call.slice_seconds());
  }
  return absl::OkStatus();
}

absl::Status CudaDevice::Attend(const ForwardCall& call) {
  LaunchAll();
  const Problem& p = *call.problem;
  PaddedRows rows(*this, p, call.workspace);
  ForwardCall padded = call;
  padded.q = rows.In(call.q, PaddedRows::kQuery);
  padded.k = rows.In(call.k, PaddedRows::kKey);
  padded.v = rows.In(call.v, PaddedRows::kValue);
  padded.o = rows.Out(call.o, PaddedRows::kOutput);
  const cuda::DevicePart arena =
      PartAt(rows.next(), GroupBytes(engine_, OneSequence(p), Direction::kForward));
  for (const ShardRange& group : GroupsOf(p)) {
    const Problem part = SubProblem(p, group);
    RETURN_IF_ERROR(RunAttention(CallOfGroup(padded, part, group), arena));
  }
  rows.Return();
  return absl::OkStatus();
}

absl::Status CudaDevice::AttendBackward(const BackwardCall& call) {
  const Problem& p = *call.problem;
  const auto before = [&](const void* data, const cuda::RowShape& shape, int64_t stride) {
    const int64_t rows = shape.rows() / shape.heads;
    BeforeWriting(ByteRange::At(data, stride == 0 ? shape.padded_bytes() : 2 * rows * stride));
  };
  before(call.d_q, cuda::QueryRows(p), call.d_strides.q);
  before(call.d_k, cuda::KeyRows(p), call.d_strides.k);
  before(call.d_v, cuda::ValueRows(p), call.d_strides.v);
  BeforeWriting(
      ByteRange::At(call.workspace, AttentionBytes(OneSequence(p), Direction::kBackward)));
  PaddedRows rows(*this, p, call.workspace);
  BackwardCall padded = call;
  padded.q = rows.In(call.q, PaddedRows::kQuery);
  padded.k = rows.In(call.k, PaddedRows::kKey);
  padded.v = rows.In(call.v, PaddedRows::kValue);
  padded.o = rows.In(call.o, PaddedRows::kOutput);
  padded.d_o = rows.In(call.d_o, PaddedRows::kOutput);
  padded.d_q = rows.Out(call.d_q, PaddedRows::kQuery);
  padded.d_k = rows.Out(call.d_k, PaddedRows::kKey);
  padded.d_v = rows.Out(call.d_v, PaddedRows::kValue);
  const cuda::DevicePart arena =
      PartAt(rows.next(), GroupBytes(engine_, OneSequence(p), Direction::kBackward));
  for (const ShardRange& group : GroupsOf(p)) {
    const Problem part = SubProblem(p, group);
    RETURN_IF_ERROR(RunAttention(CallOfGroup(padded, part, group), arena));
  }
  rows.Return();
  return absl::OkStatus();
}

// ---- Steps.

absl::Status CudaDevice::SquaredNorms(absl::Span<const Gradients> ranges,
                                      absl::Span<double> norms) {
  constexpr size_t kMostRanges = LaunchQueue::kMostConstants / sizeof(SquaresRange);
  constexpr int32_t kMostWarps =
      (LaunchQueue::kStagingBytes - kMostRanges * sizeof(double)) / (32 * sizeof(double));
  std::vector<SquaresRange> waiting;
  std::vector<size_t> places;  // in `ranges`, of those
  int32_t warps = 0;
  std::fill(norms.begin(), norms.end(), 0);
  LaunchAll();
  const auto run = [&]() -> absl::Status {
    const auto count = static_cast<int32_t>(waiting.size());
    std::vector<double> totals(waiting.size());
    auto* sums = reinterpret_cast<double*>(queue_.staging());
    SquaresDesc desc = {
        .ranges = static_cast<const SquaresRange*>(queue_.Constants(
            waiting.data(), static_cast<int64_t>(waiting.size() * sizeof(waiting[0])))),
        .runs = sums,
        .range_count = count,
        .warps = warps};
    queue_.Add(KernelKind::kDenseSquares, desc, DivideUp(warps, kSquaresWarps),
               4.0 * warps * kSquaresNumbersOfWarp);
    desc.totals = sums + int64_t{kMostWarps} * 32;
    queue_.Add(KernelKind::kDenseSquares, desc, DivideUp(count, kSquaresWarps), 8.0 * warps * 32);
    RETURN_IF_ERROR(
        queue_.Download({.device = reinterpret_cast<uint64_t>(desc.totals),
                         .host = reinterpret_cast<std::byte*>(totals.data()),
                         .bytes = static_cast<int64_t>(totals.size() * sizeof(double))}));
    RETURN_IF_ERROR(queue_.Flush());
    for (size_t n = 0; n < totals.size(); ++n) norms[places[n]] = totals[n];
    waiting.clear();
    places.clear();
    warps = 0;
    return absl::OkStatus();
  };
  for (size_t range = 0; range < ranges.size(); ++range) {
    for (int64_t first = 0; first < ranges[range].count;) {
      const int64_t count = std::min(int64_t{kMostWarps - warps} * kSquaresNumbersOfWarp,
                                     ranges[range].count - first);
      waiting.push_back({ranges[range].data + first, count, norms[range], warps});
      places.push_back(range);
      warps += static_cast<int32_t>(DivideUp(count, kSquaresNumbersOfWarp));
      first += count;
      if (warps == kMostWarps || waiting.size() == kMostRanges) RETURN_IF_ERROR(run());
    }
  }
  return waiting.empty() ? queue_.Flush() : run();
}

void CudaDevice::Step(absl::Span<const WeightStep> steps) {
  LaunchAll();
  constexpr size_t kMost = LaunchQueue::kMostConstants / sizeof(StepDesc);
  while (!steps.empty()) {
    std::vector<StepDesc> list;
    int64_t blocks = 0, numbers = 0;
    for (; list.size() < std::min(kMost, steps.size()) && numbers < kMostNumbers;) {
      const WeightStep& of = steps[list.size()];
      const bool is_packed = of.matrix.has_value() && PackedBytes(*of.matrix) > 0;
      const DenseTensor packed =
          is_packed ? TensorOf(Tensor{of.matrix->packed, of.matrix->operand}) : DenseTensor{};
      list.push_back(StepDescOf(of, packed, static_cast<int32_t>(blocks)));
      blocks += DivideUp(of.step.count, kStepNumbersOfBlock);
      numbers += of.step.count;
    }
    steps.remove_prefix(list.size());
    const StepListDesc desc = {
        static_cast<const StepDesc*>(
            queue_.Constants(list.data(), static_cast<int64_t>(list.size() * sizeof(list[0])))),
        static_cast<int32_t>(list.size())};
    queue_.Add(KernelKind::kDenseStep, desc, blocks, 38.0 * static_cast<double>(numbers));
  }
}

}  // namespace attnd
