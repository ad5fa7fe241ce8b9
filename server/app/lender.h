// Lender: the process of `attnd --lend`. It touches no GPU. While nobody else uses the GPUs it runs
// the daemon, the same program with the same flags, as its child; when another process computes on
// one of them it gives them back:
//
//   waiting ──(LendRule::MayTake)──> lent: the child serves ──(MustGiveBack)──> given back, waiting
//
// The child learns of it by the end of its standard input: it drains for DrainOfLoan and ends; what
// is left after LendOptions::within is killed. A process and not a context, because the kernel
// frees all memory of a process whatever state it, its threads or its GPU are in. While waiting the
// metrics port is the lender's, and nobody listens on the other addresses.
// One thread.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "kernels/cuda/driver/nvml.h"
#include "net/file_descriptor.h"
#include "server/app/lend_rule.h"
#include "server/app/options.h"
#include "server/metrics/sampled_metrics.h"

namespace attnd {

// Returns what the lender of this process has counted; nothing if it is no lender's child.
std::optional<LendOptions::Loans> LoansOfLender();

// How long a child may drain when its GPUs are given back: the rest is for saving and ending.
absl::Duration DrainOfLoan(const LendOptions& options);

void AddLendMetrics(const LendOptions::Loans& loans, bool lent, SampledMetrics& metrics);

class Lender {
 public:
  // Waits; false when a signal to stop came.
  using Wait = std::function<bool(absl::Duration)>;

  // `argv` and `log` outlive the lender. Errors: those of Nvml and LentGpus.
  static absl::StatusOr<std::unique_ptr<Lender>> Start(const ServerOptions& options, char** argv,
                                                       Wait wait, Logger& log);

  // The exit code, after a signal, or when a daemon has ended by itself. Errors: what NVML says,
  // what LendRule does, UNAVAILABLE for the metrics port, and INTERNAL when no child can start.
  absl::StatusOr<int> Run();

 private:
  struct Child {
    pid_t process;
    FileDescriptor input;
  };

  Lender(const ServerOptions& options, char** argv, Wait wait, Logger& log)
      : options_(options),
        argv_(argv),
        wait_(std::move(wait)),
        log_(log),
        rule_(options.lend.after) {}

  absl::StatusOr<std::vector<GpuUse>> Look() const;
  // False after a signal.
  absl::StatusOr<bool> WaitUntilFree();
  // Nothing when GPUs have been given back, else the exit code.
  absl::StatusOr<std::optional<int>> Lend();
  absl::StatusOr<Child> StartChild() const;
  void GiveBack(Child& child);
  int Drain(const Child& child);
  void BeatWatchdog();

  const ServerOptions& options_;
  char** const argv_;
  const Wait wait_;
  Logger& log_;
  LendRule rule_;
  std::unique_ptr<Nvml> nvml_;
  std::vector<std::string> gpus_;  // UUIDs
  LendOptions::Loans loans_;
  bool stopping_ = false;  // a signal came
  absl::Time next_beat_ = absl::InfinitePast();
};

}  // namespace attnd
