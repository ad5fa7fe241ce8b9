#include "tests/conformance/conformance_launch.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr int64_t kGuardBytes = 64;
constexpr std::byte kPoison{0xff};  // NaN in every element type

class HostCallMemory : public CallMemory {
 public:
  void* Allocate(int64_t bytes) override {
    blocks_.emplace_back(bytes);
    return blocks_.back().data();
  }
  void Write(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, bytes); }
  void Read(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, bytes); }
  void Clear() override { blocks_.clear(); }

 private:
  std::vector<AlignedBytes> blocks_;
};

// Placement: the tensors of one launch in a CallMemory, cleared when it goes.
class Placement {
 public:
  explicit Placement(CallMemory& memory) : memory_(memory) {}
  ~Placement() { memory_.Clear(); }

  // Null for an empty tensor.
  void* Input(const void* data, int64_t bytes) {
    if (bytes == 0) return nullptr;
    void* place = memory_.Allocate(bytes);
    memory_.Write(place, data, bytes);
    return place;
  }
  void* Input(const AlignedBytes& tensor) { return Input(tensor.data(), tensor.size()); }
  void* Input(const Bytes& tensor) { return Input(tensor.data(), tensor.size()); }

  void* Output(const char* name, int64_t bytes) {
    if (bytes == 0) return nullptr;
    Bytes poison(bytes + kGuardBytes, kPoison);
    void* place = memory_.Allocate(bytes + kGuardBytes);
    memory_.Write(place, poison.data(), bytes + kGuardBytes);
    outputs_.push_back({name, place, bytes});
    return place;
  }

  Bytes Read(const void* place, int64_t bytes) {
    Bytes data(place != nullptr ? bytes : 0);
    if (!data.empty()) memory_.Read(data.data(), place, bytes);
    return data;
  }

  absl::Status CheckGuards() {
    for (const OutputPlace& output : outputs_) {
      Bytes guard = Read(static_cast<std::byte*>(output.place) + output.bytes, kGuardBytes);
      if (std::any_of(guard.begin(), guard.end(), [](std::byte b) { return b != kPoison; })) {
        return absl::InternalError(absl::StrCat(output.name, " was written behind its end"));
      }
    }
    return absl::OkStatus();
  }

 private:
  struct OutputPlace {
    const char* name;
    void* place;
    int64_t bytes;
  };
  CallMemory& memory_;
  std::vector<OutputPlace> outputs_;
};

int64_t OutputBytes(const Problem& p) { return p.OutputElements() * ElementBytes(p.element); }
int64_t LseBytes(const Problem& p) { return p.LseElements() * int64_t{sizeof(float)}; }
int64_t QueryBytes(const Problem& p) { return p.QueryElements() * ElementBytes(p.element); }
int64_t KeyBytes(const Problem& p) { return p.KeyElements() * ElementBytes(p.element); }
int64_t ValueBytes(const Problem& p) { return p.ValueElements() * ElementBytes(p.element); }
int64_t BiasGradientBytes(const Problem& p) {
  bool wanted = p.bias && p.bias->want_gradient;
  return wanted ? p.bias->shape.elements() * int64_t{sizeof(float)} : 0;
}
int64_t SinkGradientBytes(const Problem& p) {
  bool wanted = p.denominator == DenominatorKind::kSink;
  return wanted ? p.batch * p.q_heads * int64_t{sizeof(float)} : 0;
}

template <class Call>
void PlaceInputs(const LaunchItem& item, Placement& placement, Call& call) {
  call.problem = item.problem;
  call.q = placement.Input(item.inputs->q);
  call.k = placement.Input(item.inputs->k);
  call.v = placement.Input(item.inputs->v);
  call.mask_bits = static_cast<const uint8_t*>(placement.Input(item.inputs->mask_bits));
  call.bias = placement.Input(item.inputs->bias);
}

ForwardCall PlaceForward(const Backend& backend, const LaunchItem& item, Placement& placement) {
  const Problem& p = *item.problem;
  ForwardCall call;
  PlaceInputs(item, placement, call);
  call.o = placement.Output("o", OutputBytes(p));
  call.lse = static_cast<float*>(placement.Output("lse", LseBytes(p)));
  call.workspace = static_cast<std::byte*>(
      placement.Output("workspace", backend.WorkspaceBytes(p, Direction::kForward)));
  return call;
}

BackwardCall PlaceBackward(const Backend& backend, const LaunchItem& item, Placement& placement) {
  const Problem& p = *item.problem;
  BackwardCall call;
  call.problem = item.problem;
  call.residual = item.residual;
  if (item.residual == nullptr) {
    PlaceInputs(item, placement, call);
    call.o = placement.Input(item.o);
    call.lse = static_cast<const float*>(placement.Input(item.lse));
  }
  call.d_o = placement.Input(item.inputs->d_o);
  if (item.with_d_lse) {
    call.d_lse = static_cast<const float*>(placement.Input(item.inputs->d_lse));
  }
  call.d_q = placement.Output("d_q", QueryBytes(p));
  call.d_k = placement.Output("d_k", KeyBytes(p));
  call.d_v = placement.Output("d_v", ValueBytes(p));
  call.d_bias = static_cast<float*>(placement.Output("d_bias", BiasGradientBytes(p)));
  call.d_sink = static_cast<float*>(placement.Output("d_sink", SinkGradientBytes(p)));
  call.workspace = static_cast<std::byte*>(
      placement.Output("workspace", backend.WorkspaceBytes(p, Direction::kBackward)));
  return call;
}

}  // namespace

std::unique_ptr<CallMemory> MakeHostCallMemory() { return std::make_unique<HostCallMemory>(); }

absl::StatusOr<LaunchOutcome<ForwardResults>> LaunchForward(Backend& backend, CallMemory& memory,
                                                            const std::vector<LaunchItem>& items) {
  Placement placement(memory);
  std::vector<ForwardCall> calls;
  for (const LaunchItem& item : items) calls.push_back(PlaceForward(backend, item, placement));
  LaunchOutcome<ForwardResults> outcome;
  outcome.kept.resize(items.size());
  for (size_t n = 0; n < items.size(); ++n) {
    if (items[n].keep) calls[n].kept = &outcome.kept[n];
  }
  ASSIGN_OR_RETURN(outcome.report, backend.Forward(calls));
  RETURN_IF_ERROR(placement.CheckGuards());
  for (const ForwardCall& call : calls) {
    outcome.results.push_back({placement.Read(call.o, OutputBytes(*call.problem)),
                               placement.Read(call.lse, LseBytes(*call.problem))});
  }
  return outcome;
}

absl::StatusOr<LaunchOutcome<BackwardResults>> LaunchBackward(
    Backend& backend, CallMemory& memory, const std::vector<LaunchItem>& items) {
  Placement placement(memory);
  std::vector<BackwardCall> calls;
  for (const LaunchItem& item : items) calls.push_back(PlaceBackward(backend, item, placement));
  LaunchOutcome<BackwardResults> outcome;
  ASSIGN_OR_RETURN(outcome.report, backend.Backward(calls));
  RETURN_IF_ERROR(placement.CheckGuards());
  for (const BackwardCall& call : calls) {
    const Problem& p = *call.problem;
    outcome.results.push_back(
        {placement.Read(call.d_q, QueryBytes(p)), placement.Read(call.d_k, KeyBytes(p)),
         placement.Read(call.d_v, ValueBytes(p)), placement.Read(call.d_bias, BiasGradientBytes(p)),
         placement.Read(call.d_sink, SinkGradientBytes(p))});
  }
  return outcome;
}

absl::StatusOr<BothResults> RunBothWays(Backend& backend, const Problem& problem,
                                        const ProblemInputs& inputs) {
  std::unique_ptr<CallMemory> memory = MakeHostCallMemory();
  LaunchItem item{.problem = &problem, .inputs = &inputs, .with_d_lse = false};
  ASSIGN_OR_RETURN(auto forward, LaunchForward(backend, *memory, {item}));
  item.o = forward.results[0].o;
  item.lse = forward.results[0].lse;
  ASSIGN_OR_RETURN(auto backward, LaunchBackward(backend, *memory, {item}));
  return BothResults{std::move(forward.results[0]), std::move(backward.results[0])};
}

}  // namespace attnd
