// ResidualTensors: what one Forward read and wrote (q, k, v, mask, bias, o, lse) and its Problem,
// kept in the engine's reach so that a Backward needs d_o alone. Made by DeviceWorker from the
// memory and the Ticket of the call that computed it; immutable. Held by shared_ptr, because its
// memory is needed by several at once: the lease (LeaseTable), each Backward that runs on it, and
// the reply that still sends o from it. A lease that ends takes nothing from under a kernel or a
// send: the last holder frees. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "attention/problem.h"
#include "server/admission.h"
#include "server/call.h"
#include "server/staged_tensors.h"

namespace attnd {

class ResidualTensors {
 public:
  // `staged` without its workspace; `ticket` pays for it.
  ResidualTensors(const Problem& problem, StagedTensors staged, Ticket ticket)
      : problem_(problem), ticket_(std::move(ticket)), staged_(std::move(staged)) {}

  const Problem& problem() const { return problem_; }
  const TensorPlaces& places() const { return staged_.at; }
  int64_t bytes() const { return staged_.inputs.size() + staged_.outputs.size(); }

 private:
  const Problem problem_;
  Ticket ticket_;
  StagedTensors staged_;  // after the ticket: its memory is back before the promise
};

}  // namespace attnd
