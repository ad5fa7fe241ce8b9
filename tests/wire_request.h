// What daemon tests send: requests with random tensors for a Problem, as generated messages, and
// the same call computed by an engine directly, to compare with byte for byte.
#pragma once

#include <cstdint>

#include "attention/problem.h"
#include "kernels/backend.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

// A valid problem: one batch entry, as many keys as rows, float32, head dim 8.
Problem SmallProblem(int64_t length = 16, int64_t heads = 2);

// lse is asked for.
v1::ForwardRequest MakeForward(const Problem& problem, uint64_t seed);
// o and lse as forward's reply holds them; d_lse is sent too.
v1::BackwardRequest MakeBackward(const Problem& problem, uint64_t seed,
                                 const v1::ForwardResponse& forward);

// The reply that `backend` gives when it is called directly, without receipt.
v1::ForwardResponse ComputeForward(Backend& backend, const Problem& problem,
                                   const v1::ForwardRequest& request);
v1::BackwardResponse ComputeBackward(Backend& backend, const Problem& problem,
                                     const v1::BackwardRequest& request);

}  // namespace attnd
