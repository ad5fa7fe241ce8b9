// Residual: what the servers keep of one Forward so that its Backward sends d_o alone. It may hold
// nothing: keeping is a favour, and a server may take it back at any time; Backward then sends
// everything, and the result is bitwise the same. Its end gives the leases back soon, without
// waiting for anything; while it lives the client prolongs them. It may outlive its client and is
// then empty. Threads: several Backwards may use one at once.
#pragma once

#include <cstdint>
#include <memory>

namespace attnd {

class AttentionClient;
struct ResidualState;

class Residual {
 public:
  Residual();
  Residual(Residual&&) noexcept;
  Residual& operator=(Residual&&) noexcept;
  ~Residual();

  int64_t bytes_held() const;  // on the servers, as far as is known here; 0: nothing

 private:
  friend class AttentionClient;
  explicit Residual(std::unique_ptr<ResidualState> state);
  std::unique_ptr<ResidualState> state_;
};

}  // namespace attnd
