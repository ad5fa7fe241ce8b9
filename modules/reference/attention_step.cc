#include "modules/reference/attention_step.h"

#include <utility>

#include "attention/reference.h"
#include "modules/reference/rotary.h"

namespace attnd {
namespace {

// q or k of one op, on its way to attention and back.
class TurnedHeads {
 public:
  TurnedHeads(const AttentionCall& call, const HeadColumns& columns, bool has_norm,
              const NormRule& rule)
      : call_(call), columns_(columns), has_norm_(has_norm), rule_(rule) {}

  Numbers Forward(Numbers heads) const {
    if (has_norm_) {
      heads = NormForward(rule_, columns_.dim, heads, call_.round);
      call_.round.To(call_.problem.element, heads);
    }
    return Rotated(Turn::kForward, std::move(heads));
  }

  // `d_weight` may be null.
  Numbers Backward(const Numbers& heads, Numbers d_heads, Numbers* d_weight) const {
    call_.round.To(call_.problem.element, d_heads);
    d_heads = Rotated(Turn::kBackward, std::move(d_heads));
    if (!has_norm_) return d_heads;
    AddNormGradients(rule_, columns_.dim, columns_.heads, heads, d_heads, call_.round, d_weight,
                     nullptr);
    return NormInputGradient(rule_, columns_.dim, heads, d_heads);
  }

 private:
  Numbers Rotated(Turn turn, Numbers heads) const {
    if (!call_.op.rotary.has_value()) return heads;
    heads = ApplyRotary(*call_.op.rotary, turn, call_.positions, columns_.heads, columns_.dim,
                        std::move(heads), call_.round);
    call_.round.To(call_.problem.element, heads);
    return heads;
  }

  const AttentionCall& call_;
  const HeadColumns& columns_;
  const bool has_norm_;
  const NormRule& rule_;
};

TurnedHeads TurnedQ(const AttentionCall& call) {
  return {call, call.op.q, call.op.q_norm.has_value(), call.q_rule};
}
TurnedHeads TurnedK(const AttentionCall& call) {
  return {call, call.op.k, call.op.k_norm.has_value(), call.k_rule};
}

Reference EngineOf(const AttentionCall& call, const AttentionHeads& heads) {
  return Reference(call.problem, {.mask_bits = call.mask_bits}, TurnedQ(call).Forward(heads.q),
                   TurnedK(call).Forward(heads.k), heads.v);
}

}  // namespace

Numbers GatherHeads(const HeadColumns& heads, int64_t columns, const Numbers& value) {
  const int64_t rows = static_cast<int64_t>(value.size()) / columns;
  Numbers gathered;
  gathered.reserve(rows * heads.columns());
  for (int64_t row = 0; row < rows; ++row) {
    const auto begin = value.begin() + row * columns + heads.first_column;
    gathered.insert(gathered.end(), begin, begin + heads.columns());
  }
  return gathered;
}

AttentionOutput AttentionForward(const AttentionCall& call, const AttentionHeads& heads) {
  ReferenceOutputs out = EngineOf(call, heads).Forward();
  call.round.To(call.problem.element, out.o);
  call.round.To(ElementType::kFloat32, out.lse);
  return {std::move(out.o), std::move(out.lse)};
}

AttentionHeads AttentionBackward(const AttentionCall& call, const AttentionHeads& heads,
                                 const AttentionOutput& output, const Numbers& d_o,
                                 Numbers* d_q_norm, Numbers* d_k_norm) {
  const Reference engine = EngineOf(call, heads);
  const ReferenceOutputs given{output.o, output.lse};
  ReferenceGradients g = engine.EmptyGradients();
  for (int64_t b = 0; b < call.problem.batch; ++b) {
    for (int64_t h = 0; h < call.problem.q_heads; ++h) {
      engine.BackwardHead(b, h, d_o, nullptr, call.round.rounds() ? &given : nullptr, g);
    }
  }
  return {TurnedQ(call).Backward(heads.q, std::move(g.d_q), d_q_norm),
          TurnedK(call).Backward(heads.k, std::move(g.d_k), d_k_norm), std::move(g.d_v)};
}

}  // namespace attnd
