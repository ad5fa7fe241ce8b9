// Batch: admitted calls that share one launch. Closed: nobody joins. Made only by Batcher.
#pragma once

#include <utility>
#include <vector>

#include "server/admission.h"
#include "server/call.h"

namespace attnd {

class Batch {
 public:
  Batch(Batch&&) = default;
  Batch& operator=(Batch&&) = default;

  Direction direction() const { return direction_; }
  std::vector<AdmittedCall>& calls() { return calls_; }
  const std::vector<AdmittedCall>& calls() const { return calls_; }

 private:
  friend class Batcher;
  explicit Batch(Direction direction) : direction_(direction) {}
  Direction direction_;
  std::vector<AdmittedCall> calls_;
};

}  // namespace attnd
