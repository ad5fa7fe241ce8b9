// The tensors of one call as the client's tests compare them: a place for each result, and what an
// engine gives when the call is neither cut nor sent. Threads: none of its own.
#pragma once

#include <cstdint>

#include "attention/random_problem.h"
#include "base/check.h"
#include "client/attention_client.h"
#include "kernels/backend.h"

namespace attnd {

struct Outputs {
  explicit Outputs(const Problem& p)
      : o(Unwritten(p.OutputElements() * ElementBytes(p.element))),
        lse(Unwritten(p.LseElements() * 4)),
        d_q(Unwritten(p.QueryElements() * ElementBytes(p.element))),
        d_k(Unwritten(p.KeyElements() * ElementBytes(p.element))),
        d_v(Unwritten(p.ValueElements() * ElementBytes(p.element))),
        d_bias(Unwritten(p.bias ? p.bias->shape.elements() * 4 : 0)),
        d_sink(Unwritten(p.batch * p.q_heads * 4)) {}
  AlignedBytes o, lse, d_q, d_k, d_v, d_bias, d_sink;

  ForwardOutputs forward() { return {o.data(), lse.as<float>()}; }
  BackwardOutputs backward() {
    return {d_q.data(), d_k.data(), d_v.data(), d_bias.as<float>(), d_sink.as<float>()};
  }
};

inline ForwardTensors ForwardInputs(const ProblemInputs& in) {
  return {in.q.data(), in.k.data(), in.v.data(), in.mask_bits.as<uint8_t>(), in.bias.data()};
}

inline BackwardTensors BackwardInputs(const ProblemInputs& in, const Outputs& out) {
  return {in.q.data(),         in.k.data(),  in.v.data(),         in.mask_bits.as<uint8_t>(),
          in.bias.data(),      out.o.data(), out.lse.as<float>(), in.d_o.data(),
          in.d_lse.as<float>()};
}

// What the engine gives when nothing is cut: forward alone.
inline Outputs RunForward(Backend& engine, const Problem& p, const ProblemInputs& in) {
  Outputs out(p);
  AlignedBytes workspace(engine.WorkspaceBytes(p, Direction::kForward));
  ForwardCall forward{.problem = &p,
                      .q = in.q.data(),
                      .k = in.k.data(),
                      .v = in.v.data(),
                      .mask_bits = in.mask_bits.as<uint8_t>(),
                      .bias = in.bias.data(),
                      .o = out.o.data(),
                      .lse = out.lse.as<float>(),
                      .workspace = workspace.data()};
  CHECK(engine.Forward({&forward, 1}).ok());
  return out;
}

// Backward of `o` and `lse`, into `out`.
inline void RunBackward(Backend& engine, const Problem& p, const ProblemInputs& in,
                        const AlignedBytes& o, const AlignedBytes& lse, Outputs& out) {
  const bool has_sink = p.denominator == DenominatorKind::kSink;
  AlignedBytes workspace(engine.WorkspaceBytes(p, Direction::kBackward));
  BackwardCall backward{.problem = &p,
                        .q = in.q.data(),
                        .k = in.k.data(),
                        .v = in.v.data(),
                        .mask_bits = in.mask_bits.as<uint8_t>(),
                        .bias = in.bias.data(),
                        .o = o.data(),
                        .lse = lse.as<float>(),
                        .d_o = in.d_o.data(),
                        .d_lse = in.d_lse.as<float>(),
                        .d_q = out.d_q.data(),
                        .d_k = out.d_k.data(),
                        .d_v = out.d_v.data(),
                        .d_bias = out.d_bias.as<float>(),
                        .d_sink = has_sink ? out.d_sink.as<float>() : nullptr,
                        .workspace = workspace.data()};
  CHECK(engine.Backward({&backward, 1}).ok());
}

// Forward, then backward.
inline Outputs RunWhole(Backend& engine, const Problem& p, const ProblemInputs& in) {
  Outputs out = RunForward(engine, p, in);
  RunBackward(engine, p, in, out.o, out.lse, out);
  return out;
}

}  // namespace attnd
