// Which GPUs `attnd --lend` lends, and when: from what NVML says of them, without touching any.
//
//   waiting → lent    no process computes on them and they are idle, for as long as asked
//   lent → waiting    a process other than the daemon computes on one of them
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/cuda/driver/nvml.h"

namespace attnd {

// The UUIDs of the GPUs that a daemon with `devices` (ordinals; empty: all) will use, of all in
// `uuids`. `visible` is CUDA_VISIBLE_DEVICES and `order` CUDA_DEVICE_ORDER, null if unset; ordinals
// count in PCI order. INVALID_ARGUMENT for what NVML cannot tell apart.
absl::StatusOr<std::vector<std::string>> LentGpus(const std::vector<std::string>& uuids,
                                                  const std::vector<int>& devices,
                                                  const char* visible, const char* order);

// One thread.
class LendRule {
 public:
  // Use up to this, in percent, is a display or a monitor.
  static constexpr int kIdlePercent = 5;
  // NVML shows a daemon that serves within this time.
  static constexpr absl::Duration kShown = absl::Seconds(60);

  explicit LendRule(absl::Duration after) : after_(after) {}

  // While waiting, with what was seen of each GPU now: whether to take them.
  bool MayTake(const std::vector<GpuUse>& uses, absl::Time now);
  // When the daemon with this process id has been started.
  void Taken(unsigned own, absl::Time now);
  // While lent: whether to give them back. FAILED_PRECONDITION when NVML does not show the daemon
  // under its process id, so that its owner's programs cannot be told from it.
  absl::StatusOr<bool> MustGiveBack(const std::vector<GpuUse>& uses, absl::Time now);

 private:
  const absl::Duration after_;
  std::optional<absl::Time> idle_since_;
  unsigned own_ = 0;
  absl::Time taken_;
  bool shown_ = false;    // the daemon, since it was started
  bool unshown_ = false;  // the last loan ended before NVML had shown its daemon
};

}  // namespace attnd
