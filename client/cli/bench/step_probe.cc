#include "client/cli/bench/step_probe.h"

#include <algorithm>
#include <vector>

#include "absl/time/clock.h"
#include "attention/cost.h"
#include "attention/random_problem.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr double kEnoughSeconds = 0.25;    // of a step that rates are taken from
constexpr double kEnoughBytes = 64 << 20;  // of a step on the fuller way
constexpr double kMostSeconds = 4;         // of the repetitions of one step
constexpr int kFewestSteps = 3, kMostSteps = 40;

// The arrays of a problem, and its steps.
class Stepper {
 public:
  Stepper(AttentionClient& client, const Problem& problem, bool leases)
      : client_(client),
        p_(problem),
        leases_(leases),
        in_(RandomInputs(problem, /*seed=*/1)),
        o_(p_.OutputElements() * ElementBytes(p_.element)),
        lse_(p_.LseElements() * int64_t{sizeof(float)}),
        d_q_(p_.QueryElements() * ElementBytes(p_.element)),
        d_k_(p_.KeyElements() * ElementBytes(p_.element)),
        d_v_(p_.ValueElements() * ElementBytes(p_.element)) {}

  absl::Status Step() {
    Residual residual;
    RETURN_IF_ERROR(client_
                        .Forward(p_, {.q = in_.q.data(), .k = in_.k.data(), .v = in_.v.data()},
                                 {.o = o_.data(), .lse = lse_.as<float>()}, {},
                                 leases_ ? &residual : nullptr)
                        .status());
    return client_
        .Backward(p_,
                  {.q = in_.q.data(),
                   .k = in_.k.data(),
                   .v = in_.v.data(),
                   .o = o_.data(),
                   .lse = lse_.as<float>(),
                   .d_o = in_.d_o.data()},
                  {.d_q = d_q_.data(), .d_k = d_k_.data(), .d_v = d_v_.data()}, {},
                  leases_ ? &residual : nullptr)
        .status();
  }

 private:
  AttentionClient& client_;
  const Problem& p_;
  const bool leases_;
  const ProblemInputs in_;
  AlignedBytes o_, lse_, d_q_, d_k_, d_v_;
};

// Seconds of a step: the median, after one that opens connections.
absl::StatusOr<double> TimeOf(AttentionClient& client, const Problem& problem, bool leases) {
  Stepper stepper(client, problem, leases);
  RETURN_IF_ERROR(stepper.Step());
  std::vector<double> times;
  double total = 0;
  const auto more = [&] {
    const int count = static_cast<int>(times.size());
    if (count == 0) return true;
    if (total > kMostSeconds || count == kMostSteps) return false;
    return count < kFewestSteps || total < kEnoughSeconds;
  };
  while (more()) {
    const absl::Time start = absl::Now();
    RETURN_IF_ERROR(stepper.Step());
    times.push_back(absl::ToDoubleSeconds(absl::Now() - start));
    total += times.back();
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// The first `groups` of the problem's KV heads with their query heads, of whole batch entries where
// there are several.
Problem PartOf(const Problem& problem, int64_t groups) {
  Problem part = problem;
  part.batch = std::max<int64_t>(1, groups / problem.kv_heads);
  part.kv_heads = std::min(groups, problem.kv_heads);
  part.q_heads = part.kv_heads * problem.group_size();
  if (!IsPacked(problem.layout)) return part;
  part.cu_seqlens_q.resize(part.batch + 1);
  part.cu_seqlens_k.resize(part.batch + 1);
  part.q_len = part.cu_seqlens_q.back();
  part.kv_len = part.cu_seqlens_k.back();
  return part;
}

// The same bytes, and nothing to compute: no key is there to be seen.
Problem WithoutWork(const Problem& problem) {
  Problem p;
  p.batch = problem.batch;
  p.q_heads = problem.q_heads;
  p.kv_heads = problem.kv_heads;
  p.q_len = problem.MaxQueryLength();
  p.kv_len = problem.MaxKeyLength();
  p.qk_head_dim = problem.qk_head_dim;
  p.v_head_dim = problem.v_head_dim;
  p.element = problem.element;
  p.kv_lengths.assign(p.batch, 0);
  return p;
}

Problem SmallestOf(const Problem& problem) {
  Problem p = WithoutWork(problem);
  p.batch = p.q_heads = p.kv_heads = p.q_len = p.kv_len = 1;
  p.kv_lengths = {0};
  return p;
}

}  // namespace

StepWork WorkOf(const Problem& p, bool leases) {
  const PayloadBytes forward = BytesOf(p, Direction::kForward);
  const PayloadBytes backward = BytesOf(p, Direction::kBackward);
  // With a lease the server still has all but dO, which is of O's size.
  const int64_t sent = leases ? forward.output : backward.input;
  return {.bytes = static_cast<double>(std::max(forward.input, forward.output) +
                                       std::max(sent, backward.output)),
          .flops = Flops(p, Direction::kForward) + Flops(p, Direction::kBackward)};
}

absl::StatusOr<StepRates> ProbeStep(AttentionClient& client, const Problem& problem, bool leases) {
  StepRates rates;
  ASSIGN_OR_RETURN(const double smallest, TimeOf(client, SmallestOf(problem), leases));
  rates.round_trip = smallest / 2;
  const int64_t all = problem.batch * problem.kv_heads;
  for (int64_t groups = 1;; groups *= 2) {
    const Problem part = groups < all ? PartOf(problem, groups) : problem;
    const StepWork work = WorkOf(part, leases);
    ASSIGN_OR_RETURN(const double whole, TimeOf(client, part, leases));
    if (groups < all && whole < kEnoughSeconds && work.bytes < kEnoughBytes) continue;
    ASSIGN_OR_RETURN(const double transfer, TimeOf(client, WithoutWork(part), leases));
    rates.seconds_per_byte = std::max(transfer - smallest, 0.0) / work.bytes;
    if (work.flops > 0) rates.seconds_per_flop = std::max(whole - transfer, 0.0) / work.flops;
    return rates;
  }
}

}  // namespace attnd
