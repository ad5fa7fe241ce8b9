#include "client/call/residual_state.h"

namespace attnd {

ResidualState::~ResidualState() {
  for (LeaseBook::Id id : leases) book->Release(id);
}

}  // namespace attnd
