#include "client/residual.h"

#include <optional>
#include <utility>

#include "client/call/residual_state.h"

namespace attnd {

Residual::Residual() = default;
Residual::Residual(std::unique_ptr<ResidualState> state) : state_(std::move(state)) {}
Residual::Residual(Residual&&) noexcept = default;
Residual& Residual::operator=(Residual&&) noexcept = default;
Residual::~Residual() = default;

int64_t Residual::bytes_held() const {
  int64_t bytes = 0;
  if (state_ == nullptr) return bytes;
  for (LeaseBook::Id id : state_->leases) {
    std::optional<HeldLease> lease = state_->book->Find(id);
    if (lease.has_value()) bytes += lease->bytes;
  }
  return bytes;
}

}  // namespace attnd
