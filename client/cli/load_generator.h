// LoadGenerator: calls one problem repeatedly and records each call. Closed loop: a number of
// callers, each with one call at a time. Open loop: calls arrive at a rate, whatever the answers.
// Latency then counts from when a call was due, so that it includes the wait for a free caller.
//
// Threads: Run starts the callers and joins them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "attention/problem.h"
#include "attention/random_problem.h"
#include "client/attention_client.h"

namespace attnd {

struct Load {
  int callers = 1;                 // closed loop; open loop: the most calls at a time
  double requests_per_second = 0;  // above 0: open loop
  bool poisson = true;             // arrivals of an open loop; else at even intervals
  bool forward = true, backward = false;
  absl::Duration warmup, duration;
};

// Holds what was measured of one direction.
struct Measured {
  std::vector<double> latencies;      // seconds, ascending, of the calls that succeeded
  std::map<std::string, int> errors;  // by code
  double seconds = 0;                 // of the measured time
  CallReceipt last_receipt;

  double Percentile(double percent) const;  // nearest rank; 0 without calls
  double RequestsPerSecond() const;
};

// All of them, whatever their code.
int ErrorCount(const std::map<std::string, int>& errors);

struct LoadResult {
  Measured forward, backward;
};

// The p-th percentile of ascending values by nearest rank.
double PercentileOf(const std::vector<double>& ascending, double percent);

// When call n of an open loop is due, seconds from the start; the same for the same seed.
class ArrivalSchedule {
 public:
  ArrivalSchedule(double rate, bool poisson, uint64_t seed)
      : rate_(rate), poisson_(poisson), random_(seed) {}
  double Next();

 private:
  const double rate_;
  const bool poisson_;
  Random random_;
  double at_ = 0;
};

class LoadGenerator {
 public:
  // `client` and `problem` outlive it.
  LoadGenerator(AttentionClient& client, const Problem& problem);

  // Errors: the first call's, made before anything is measured.
  absl::StatusOr<LoadResult> Run(const Load& load);

 private:
  class Caller;
  AttentionClient& client_;
  const Problem& problem_;
  ProblemInputs inputs_;
  AlignedBytes o_, lse_;  // of the first forward, for backward
};

}  // namespace attnd
