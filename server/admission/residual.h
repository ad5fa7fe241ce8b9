// ResidualTensors: the tensors of one Forward (q, k, v, mask, bias, o, lse) and its Problem, kept
// so that a Backward brings d_o alone. They lie in the memory of the device that computed them, if
// the engine keeps them there, else in staging memory. Made by Answer from the call's memory and
// Ticket; immutable. shared_ptr: the lease (LeaseTable), each Backward that runs on them, and a
// reply that still sends o share them, and the last owner frees the memory. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "attention/problem.h"
#include "kernels/backend.h"
#include "server/admission/admission.h"
#include "server/admission/staged_tensors.h"
#include "server/call/call.h"

namespace attnd {

class ResidualTensors {
 public:
  // `staged` without its workspace; `ticket` pays for it.
  ResidualTensors(const Problem& problem, StagedTensors staged, Ticket ticket)
      : problem_(problem), ticket_(std::move(ticket)), staged_(std::move(staged)) {}

  // On device number `device`; the engine outlives it.
  ResidualTensors(const Problem& problem, std::unique_ptr<const DeviceResidual> on_device,
                  int device, Ticket ticket)
      : problem_(problem),
        place_(device),
        ticket_(std::move(ticket)),
        on_device_(std::move(on_device)) {}

  const Problem& problem() const { return problem_; }
  int place() const { return place_; }                                  // a device, or kHostMemory
  const TensorPlaces& places() const { return staged_.at; }             // empty: on a device
  const DeviceResidual* on_device() const { return on_device_.get(); }  // null: in host memory
  int64_t bytes() const {
    return staged_.inputs.size() + staged_.outputs.size() +
           (on_device_ == nullptr ? 0 : on_device_->bytes());
  }

 private:
  const Problem problem_;
  const int place_ = kHostMemory;
  Ticket ticket_;
  StagedTensors staged_;  // after the ticket: its memory is back before the promise
  std::unique_ptr<const DeviceResidual> on_device_;  // likewise
};

}  // namespace attnd
