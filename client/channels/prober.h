// Prober: asks servers whether they answer at all, when calls to them make no progress.
//
//     Ask(address) → grpc.health.v1.Health/Check → verdict(address, answers)
//
// Any status that a server sends is an answer, a refusal too: a frozen process and a host that is
// cut off give none. An address without an answer is asked again every kAgain until it gives one.
//
// Threads: any. Verdicts come on the prober's own thread, which the first Ask starts.
#pragma once

#include <grpcpp/channel.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_cond_var.h"
#include "client/channels/picker.h"

namespace attnd {

class Prober {
 public:
  static constexpr absl::Duration kPatience = absl::Milliseconds(1250);
  static constexpr absl::Duration kAgain = absl::Seconds(1);

  struct Hooks {
    // Null: the address is asked no more, as if it had answered.
    std::function<std::shared_ptr<grpc::Channel>(AddressId)> channel;
    std::function<void(AddressId, bool answers)> verdict;
  };
  // `bearer_token`: of the calls; empty: none. The hooks are called until the destructor ends.
  Prober(std::string bearer_token, Hooks hooks);
  ~Prober();
  Prober(const Prober&) = delete;
  Prober& operator=(const Prober&) = delete;

  // Nothing is asked where the address is being asked already. Returns at once.
  void Ask(AddressId address);

 private:
  class Probes;

  void Main();
  // Addresses to ask now; waits for some until `until`. They are not due again before Ended.
  std::vector<AddressId> TakeDue(absl::Time until);
  void Ended(AddressId address, bool answers);

  const std::string bearer_token_;
  const Hooks hooks_;
  absl::Mutex mutex_;
  SteadyCondVar changed_;
  // When each is asked; infinite future: it is being asked.
  std::map<AddressId, absl::Time> due_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
