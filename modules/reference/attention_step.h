// AttentionStep: one attention op of a module in float64: columns → heads → QK-norm → rotary →
// attention (attention/reference.h) → columns, and back. q and k are rounded after the norm and
// after the turn, o and lse as an engine returns them; backward reads those, as engines do, unless
// nothing is rounded. One call; the problem and the rule outlive it. One thread.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/problem.h"
#include "modules/layout.h"
#include "modules/reference/norm.h"
#include "modules/reference/rounding.h"

namespace attnd {

struct AttentionOutput {
  Numbers o;    // [rows, q_heads · v_dim]
  Numbers lse;  // in the problem's layout
};

// Heads gathered from a value, before norm and rotary: [rows, heads, dim].
struct AttentionHeads {
  Numbers q, k, v;
};

struct AttentionCall {
  const AttentionOp& op;
  const Problem& problem;
  const std::vector<uint32_t>& positions;  // [rows of q]
  const uint8_t* mask_bits;                // iff problem.bool_mask
  NormRule q_rule, k_rule;                 // where op.q_norm, op.k_norm
  Rounder round;
};

Numbers GatherHeads(const HeadColumns& heads, int64_t columns, const Numbers& value);

AttentionOutput AttentionForward(const AttentionCall& call, const AttentionHeads& heads);

// The gradients of `heads`. Those of q_norm and k_norm [dim] are added where they are not null.
AttentionHeads AttentionBackward(const AttentionCall& call, const AttentionHeads& heads,
                                 const AttentionOutput& output, const Numbers& d_o,
                                 Numbers* d_q_norm, Numbers* d_k_norm);

}  // namespace attnd
