#include "kernels/reference_backend.h"

#include <unistd.h>

#include <chrono>
#include <utility>
#include <vector>

#include "attention/mask_plans.h"
#include "attention/reference.h"

namespace attnd {
namespace {

constexpr char kForwardKernel[] = "reference_forward_f64";
constexpr char kBackwardKernel[] = "reference_backward_f64";

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void StoreAll(ElementType element, const std::vector<double>& values, void* to) {
  for (size_t n = 0; n < values.size(); ++n) {
    StoreElement(element, to, static_cast<int64_t>(n), static_cast<float>(values[n]));
  }
}

void ForwardOne(const ForwardCall& call) {
  const Problem& p = *call.problem;
  Reference reference(p, {call.q, call.k, call.v, call.mask_bits, call.bias});
  ReferenceOutputs out = reference.EmptyOutputs();
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.q_heads; ++h) {
      if (call.stop.stop_requested()) return;
      reference.ForwardHead(b, h, out);
    }
  }
  StoreAll(p.element, out.o, call.o);
  StoreAll(ElementType::kFloat32, out.lse, call.lse);
}

// BiasGradient: the sum of each (batch entry, head)'s share in the contract's order: a batch
// entry's heads one after the other in float32, then the batch entries likewise.
class BiasGradient {
 public:
  BiasGradient(const Problem& p, float* total)
      : shape_(p.bias->shape),
        slice_(shape_.rows * shape_.columns),
        entry_(shape_.heads * slice_),
        total_(total, static_cast<size_t>(shape_.elements())) {}

  // Takes the head's share out of `sums`, which has the bias's shape, and zeroes it there.
  void AddHead(int64_t b, int64_t h, std::vector<double>& sums) {
    int64_t head = shape_.heads == 1 ? 0 : h;
    int64_t from = ((shape_.batch == 1 ? 0 : b) * shape_.heads + head) * slice_;
    bool first = h == 0 || shape_.heads != 1;
    for (int64_t n = 0; n < slice_; ++n) {
      float share = static_cast<float>(sums[from + n]);
      float& sum = entry_[head * slice_ + n];
      sum = first ? share : sum + share;
      sums[from + n] = 0;
    }
  }
  void EndBatchEntry(int64_t b) {
    bool first = b == 0 || shape_.batch != 1;
    float* to = &total_[(shape_.batch == 1 ? 0 : b) * entry_.size()];
    for (size_t n = 0; n < entry_.size(); ++n) to[n] = first ? entry_[n] : to[n] + entry_[n];
  }

 private:
  BroadcastShape shape_;
  int64_t slice_;             // numbers of one head's share
  std::vector<float> entry_;  // [heads or 1, rows or 1, columns or 1] of one batch entry
  absl::Span<float> total_;
};

void BackwardOne(const BackwardCall& call) {
  const Problem& p = *call.problem;
  Reference reference(p, {call.q, call.k, call.v, call.mask_bits, call.bias});
  ReferenceOutputs given = {ToDoubles(p.element, call.o, p.OutputElements()),
                            ToDoubles(ElementType::kFloat32, call.lse, p.LseElements())};
  std::vector<double> d_o = ToDoubles(p.element, call.d_o, p.OutputElements());
  ReferenceGradients g = reference.EmptyGradients();
  std::optional<BiasGradient> d_bias;
  if (p.bias && p.bias->want_gradient) d_bias.emplace(p, call.d_bias);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.q_heads; ++h) {
      if (call.stop.stop_requested()) return;
      reference.BackwardHead(b, h, d_o, call.d_lse, &given, g);
      if (d_bias) d_bias->AddHead(b, h, g.d_bias);
    }
    if (d_bias) d_bias->EndBatchEntry(b);
  }
  StoreAll(p.element, g.d_q, call.d_q);
  StoreAll(p.element, g.d_k, call.d_k);
  StoreAll(p.element, g.d_v, call.d_v);
  if (p.denominator == DenominatorKind::kSink) {
    StoreAll(ElementType::kFloat32, g.d_sink, call.d_sink);
  }
}

}  // namespace

ReferenceBackend::ReferenceBackend() {
  info_.backend = "reference";
  info_.device = "float64 reference";
  info_.architecture = "scalar";
  info_.memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  info_.threads = 1;
  info_.flops_per_second = 5e8;
}

absl::Status ReferenceBackend::Supports(const Problem&, Direction) const {
  return absl::OkStatus();
}

absl::StatusOr<MaskKernel> ReferenceBackend::KernelForMask(const Problem&,
                                                           Direction direction) const {
  return MaskKernel{
      .kernel = direction == Direction::kForward ? kForwardKernel : kBackwardKernel,
      .reason = "this engine asks the mask about every score and skips none; tiles are admission's",
      .plan = HostMaskOptions()};
}

int64_t ReferenceBackend::WorkspaceBytes(const Problem&, Direction) const { return 0; }

absl::StatusOr<LaunchReport> ReferenceBackend::Forward(absl::Span<const ForwardCall> calls) {
  auto start = std::chrono::steady_clock::now();
  for (const ForwardCall& call : calls) ForwardOne(call);
  return LaunchReport{.kernel = kForwardKernel, .seconds = SecondsSince(start)};
}

absl::StatusOr<LaunchReport> ReferenceBackend::Backward(absl::Span<const BackwardCall> calls) {
  auto start = std::chrono::steady_clock::now();
  for (const BackwardCall& call : calls) BackwardOne(call);
  return LaunchReport{.kernel = kBackwardKernel, .seconds = SecondsSince(start)};
}

absl::StatusOr<CapturedMap> ReferenceBackend::Capture(const ForwardCall& call,
                                                      const CaptureRequest& request) {
  const Problem& p = *call.problem;
  const Reference reference(p, {call.q, call.k, call.v, call.mask_bits, call.bias});
  std::vector<double> sums(static_cast<size_t>(p.q_len * p.kv_len));
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence sequence = p.SequenceAt(b);
    for (int64_t h = 0; h < p.q_heads; ++h) {
      for (int64_t i = 0; i < p.q_len && !call.stop.stop_requested(); ++i) {
        const ReferenceRow row = reference.Row(b, h, sequence, i);
        for (int64_t j = 0; j < sequence.kv_len; ++j) {
          if (row.visible[j]) sums[i * p.kv_len + j] += row.probability[j];
        }
      }
    }
  }
  std::vector<float> map(sums.size());
  const double share = 1.0 / static_cast<double>(p.batch * p.q_heads);
  for (size_t n = 0; n < sums.size(); ++n) map[n] = static_cast<float>(share * sums[n]);
  MapSums pooled({p.q_len, p.kv_len, request.block}, p.q_len, p.kv_len);
  pooled.Add(0, 0, map.data(), p.kv_len);
  CapturedMap captured = pooled.Finish();
  if (request.keep_map) captured.map = std::move(map);
  return captured;
}

}  // namespace attnd
