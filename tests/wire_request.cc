#include "tests/wire_request.h"

#include <cstddef>
#include <cstring>
#include <deque>
#include <string>

#include "attention/random_problem.h"
#include "base/check.h"
#include "client/call/problem_to_proto.h"

namespace attnd {
namespace {

std::string Text(const AlignedBytes& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()),
                     static_cast<size_t>(bytes.size()));
}

// Aligned memory for one call of an engine: inputs are copies, outputs start as NaN.
class CallMemory {
 public:
  std::byte* Input(const std::string& data) {
    if (data.empty()) return nullptr;
    std::byte* at = blocks_.emplace_back(static_cast<int64_t>(data.size())).data();
    std::memcpy(at, data.data(), data.size());
    return at;
  }
  std::byte* Output(int64_t bytes) {
    if (bytes == 0) return nullptr;
    std::byte* at = blocks_.emplace_back(bytes).data();
    std::memset(at, 0xff, static_cast<size_t>(bytes));
    return at;
  }

 private:
  std::deque<AlignedBytes> blocks_;
};

std::string Text(const void* data, int64_t bytes) {
  return bytes == 0 ? "" : std::string(static_cast<const char*>(data), static_cast<size_t>(bytes));
}

template <class Call, class Request>
void SetInputs(const Problem& p, const Request& request, CallMemory& memory, Call& call) {
  call.problem = &p;
  call.q = memory.Input(request.q());
  call.k = memory.Input(request.k());
  call.v = memory.Input(request.v());
  call.mask_bits = reinterpret_cast<const uint8_t*>(memory.Input(request.mask_bits()));
  call.bias = memory.Input(request.bias());
}

template <class Request>
void SetInputs(const Problem& p, const ProblemInputs& inputs, Request& request) {
  *request.mutable_problem() = ToProto(p);
  if (p.bool_mask) request.set_mask_bits(Text(inputs.mask_bits));
  if (p.bias) request.set_bias(Text(inputs.bias));
  request.set_k(Text(inputs.k));
  request.set_v(Text(inputs.v));
  request.set_q(Text(inputs.q));
}

}  // namespace

Problem SmallProblem(int64_t length, int64_t heads) {
  Problem p;
  p.batch = 1;
  p.q_heads = p.kv_heads = heads;
  p.q_len = p.kv_len = length;
  p.qk_head_dim = p.v_head_dim = 8;
  return p;
}

v1::ForwardRequest MakeForward(const Problem& p, uint64_t seed) {
  v1::ForwardRequest request;
  SetInputs(p, RandomInputs(p, seed), request);
  request.set_want_lse(true);
  return request;
}

v1::BackwardRequest MakeBackward(const Problem& p, uint64_t seed,
                                 const v1::ForwardResponse& forward) {
  ProblemInputs inputs = RandomInputs(p, seed);
  v1::BackwardRequest request;
  SetInputs(p, inputs, request);
  request.set_lse(forward.lse());
  request.set_o(forward.o());
  request.set_d_o(Text(inputs.d_o));
  request.set_d_lse(Text(inputs.d_lse));
  return request;
}

v1::ForwardResponse ComputeForward(Backend& backend, const Problem& p,
                                   const v1::ForwardRequest& request) {
  CallMemory memory;
  int64_t o_bytes = p.OutputElements() * ElementBytes(p.element), lse_bytes = p.LseElements() * 4;
  ForwardCall call;
  SetInputs(p, request, memory, call);
  call.o = memory.Output(o_bytes);
  call.lse = reinterpret_cast<float*>(memory.Output(lse_bytes));
  call.workspace = memory.Output(backend.WorkspaceBytes(p, Direction::kForward));
  CHECK(backend.Forward(absl::MakeConstSpan(&call, 1)).ok());
  v1::ForwardResponse reply;
  reply.set_o(Text(call.o, o_bytes));
  reply.set_lse(Text(call.lse, lse_bytes));
  return reply;
}

v1::BackwardResponse ComputeBackward(Backend& backend, const Problem& p,
                                     const v1::BackwardRequest& request) {
  CallMemory memory;
  int64_t element = ElementBytes(p.element);
  int64_t q_bytes = p.QueryElements() * element, k_bytes = p.KeyElements() * element;
  int64_t v_bytes = p.ValueElements() * element;
  bool bias_gradient = p.bias && p.bias->want_gradient;
  int64_t bias_bytes = bias_gradient ? p.bias->shape.elements() * 4 : 0;
  int64_t sink_bytes = p.denominator == DenominatorKind::kSink ? p.batch * p.q_heads * 4 : 0;
  BackwardCall call;
  SetInputs(p, request, memory, call);
  call.o = memory.Input(request.o());
  call.lse = reinterpret_cast<const float*>(memory.Input(request.lse()));
  call.d_o = memory.Input(request.d_o());
  call.d_lse = reinterpret_cast<const float*>(memory.Input(request.d_lse()));
  call.d_q = memory.Output(q_bytes);
  call.d_k = memory.Output(k_bytes);
  call.d_v = memory.Output(v_bytes);
  call.d_bias = reinterpret_cast<float*>(memory.Output(bias_bytes));
  call.d_sink = reinterpret_cast<float*>(memory.Output(sink_bytes));
  call.workspace = memory.Output(backend.WorkspaceBytes(p, Direction::kBackward));
  CHECK(backend.Backward(absl::MakeConstSpan(&call, 1)).ok());
  v1::BackwardResponse reply;
  reply.set_d_q(Text(call.d_q, q_bytes));
  reply.set_d_k(Text(call.d_k, k_bytes));
  reply.set_d_v(Text(call.d_v, v_bytes));
  reply.set_d_bias(Text(call.d_bias, bias_bytes));
  reply.set_d_sink(Text(call.d_sink, sink_bytes));
  return reply;
}

}  // namespace attnd
