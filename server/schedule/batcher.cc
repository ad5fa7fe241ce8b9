#include "server/schedule/batcher.h"

#include <algorithm>
#include <cmath>

namespace attnd {
namespace {

constexpr double kQuantumSeconds = 1e-3;  // that one round gives to weight 1

double Quantum(Priority priority) { return kQuantumSeconds * WeightOf(priority); }

}  // namespace

BatchKey BatchKey::Of(const AttentionCall& call) {
  const Problem& p = call.problem();
  return {.direction = call.direction(),
          .element = p.element,
          .qk_head_dim = static_cast<int16_t>(p.qk_head_dim),
          .v_head_dim = static_cast<int16_t>(p.v_head_dim),
          .bounded = p.IsBounded(),
          .bool_mask = p.bool_mask.has_value(),
          .mask = p.mask != nullptr,
          .bias = p.bias.has_value(),
          .alibi = !p.alibi_slopes.empty(),
          .dropout = p.dropout.threshold != 0,
          .softcap = p.softcap != 0,
          .denominator = p.denominator,
          .accumulate = p.accumulate,
          .packed = IsPacked(p.layout),
          .nondeterministic = p.allow_nondeterministic};
}

Batcher::Flow& Batcher::FlowOf(const AdmittedCall& call) {
  const std::string& caller = call.context().caller;
  Priority priority = call.call().priority();
  for (Flow& flow : flows_) {
    if (flow.priority == priority && flow.caller == caller) return flow;
  }
  return flows_.emplace_back(Flow{caller, priority, 0, {}});
}

void Batcher::Add(AdmittedCall call) {
  Calls& calls = FlowOf(call).calls;
  auto at = std::upper_bound(
      calls.begin(), calls.end(), call,
      [](const AdmittedCall& a, const AdmittedCall& b) { return a.place() < b.place(); });
  calls.insert(at, std::move(call));
  ++size_;
}

std::optional<AdmittedCall> Batcher::Remove(uint64_t id) {
  for (Flow& flow : flows_) {
    auto found = std::find_if(flow.calls.begin(), flow.calls.end(),
                              [id](const AdmittedCall& call) { return call.context().id == id; });
    if (found == flow.calls.end()) continue;
    AdmittedCall call = std::move(*found);
    flow.calls.erase(found);
    --size_;
    DropEmptyFlows();
    return call;
  }
  return std::nullopt;
}

// The first call that can still be met, or the first of all.
const AdmittedCall& Batcher::Next(const Flow& flow, absl::Time now) {
  auto next = std::find_if(flow.calls.begin(), flow.calls.end(),
                           [now](const AdmittedCall& call) { return now <= call.latest_start(); });
  return next == flow.calls.end() ? flow.calls.front() : *next;
}

// The flow that can pay for its next call after the fewest rounds. Rounds in which no flow could
// pay are skipped at once.
Batcher::Flows::iterator Batcher::NextFlow(absl::Time now) {
  auto best = flows_.end();
  double fewest = 0;
  for (auto flow = flows_.begin(); flow != flows_.end(); ++flow) {
    double missing = Next(*flow, now).seconds() - flow->credit;
    double rounds = std::max(0.0, std::ceil(missing / Quantum(flow->priority)));
    if (best == flows_.end() || rounds < fewest) {
      best = flow;
      fewest = rounds;
    }
  }
  for (Flow& flow : flows_) flow.credit += fewest * Quantum(flow.priority);
  return best;
}

std::optional<Batch> Batcher::Take(absl::Time now, int slots) {
  if (empty()) return std::nullopt;
  const int share = (static_cast<int>(size_) + slots - 1) / slots;
  const int max_calls = std::min(limits_.max_calls, std::max(share, kMinCallsToShare));
  auto leader = NextFlow(now);
  const AdmittedCall& first = Next(*leader, now);
  Batch batch(first.call().direction());
  flows_.splice(flows_.begin(), flows_, leader);  // it leads the batch
  Fill(batch, first, now, max_calls);
  flows_.splice(flows_.end(), flows_, leader);  // and waits for its next turn
  DropEmptyFlows();
  return batch;
}

void Batcher::Fill(Batch& batch, const AdmittedCall& leader, absl::Time now, int max_calls) {
  const BatchKey key = BatchKey::Of(leader.call());
  const uint64_t leader_id = leader.context().id;  // the call itself moves
  int64_t bytes = 0;
  double seconds = 0;
  for (Flow& flow : flows_) {
    for (auto call = flow.calls.begin(); call != flow.calls.end();) {
      bool first = batch.calls_.empty();
      if (static_cast<int>(batch.calls_.size()) == max_calls) return;
      const bool leads = call->context().id == leader_id;
      if (!leads && (now > call->latest_start() || !(BatchKey::Of(call->call()) == key))) {
        ++call;
        continue;
      }
      bool fits = bytes + call->bytes() <= limits_.max_bytes &&
                  seconds + call->seconds() <= limits_.max_seconds;
      if (!first && !fits) break;  // later calls of this flow and key must not overtake it
      bytes += call->bytes();
      seconds += call->seconds();
      flow.credit -= call->seconds();
      batch.calls_.push_back(std::move(*call));
      call = flow.calls.erase(call);
      --size_;
    }
  }
}

void Batcher::DropEmptyFlows() {
  flows_.remove_if([](const Flow& flow) { return flow.calls.empty(); });
}

}  // namespace attnd
