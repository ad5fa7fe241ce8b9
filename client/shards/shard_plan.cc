#include "client/shards/shard_plan.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "attention/cost.h"
#include "attention/masks/mask_description.h"

namespace attnd {
namespace {

constexpr int64_t kHeaderBytes = 1024;

int64_t LargerMessage(const Problem& whole, const ShardRange& range, Direction direction) {
  if (IsTrivial(whole, range)) return 0;
  MessageSizes bytes = MessageSizesOf(SubProblem(whole, range), direction);
  return std::max(bytes.request, bytes.reply);
}

// One way to cut, and what it costs.
struct Plan {
  std::vector<ShardRange> shards;
  int64_t largest_message = 0;
  int64_t total_bytes = 0;
};

// Cuts [0, units) into ranges, each with as many units as stay within the target, at least one;
// evenly where units are alike.
class Cutter {
 public:
  Cutter(const Problem& problem, Direction direction, int64_t target)
      : problem_(problem), direction_(direction), target_(target) {}

  // make(begin, count) is the shard of some units.
  template <class Make>
  void Cut(int64_t units, const Make& make, std::vector<ShardRange>& shards) const {
    if (IsPacked(problem_.layout)) return CutGreedily(units, make, shards);
    int64_t pieces = FewestEvenPieces(units, make);
    for (int64_t n = 0; n < pieces; ++n) {
      int64_t begin = n * units / pieces;
      shards.push_back(make(begin, (n + 1) * units / pieces - begin));
    }
  }

 private:
  template <class Make>
  bool Fits(const Make& make, int64_t begin, int64_t count) const {
    return LargerMessage(problem_, make(begin, count), direction_) <= target_;
  }

  // The largest count ≤ most for which [begin, begin + count) fits, at least 1. Sizes only grow, so
  // doubling brackets it; that looks at few entries more than the shard will hold.
  template <class Make>
  int64_t MaxThatFit(const Make& make, int64_t begin, int64_t most) const {
    int64_t low = 1;
    while (low < most && Fits(make, begin, std::min(2 * low, most))) low = std::min(2 * low, most);
    int64_t high = std::min(2 * low, most);
    while (low < high) {
      int64_t middle = low + (high - low + 1) / 2;
      if (Fits(make, begin, middle)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  template <class Make>
  int64_t FewestEvenPieces(int64_t units, const Make& make) const {
    int64_t each = MaxThatFit(make, 0, units);
    return (units + each - 1) / each;
  }

  template <class Make>
  void CutGreedily(int64_t units, const Make& make, std::vector<ShardRange>& shards) const {
    for (int64_t begin = 0; begin < units;) {
      int64_t count = MaxThatFit(make, begin, units - begin);
      shards.push_back(make(begin, count));
      begin += count;
    }
  }

  const Problem& problem_;
  Direction direction_;
  int64_t target_;
};

bool WantsBiasGradient(const Problem& p, Direction direction) {
  return direction == Direction::kBackward && p.bias && p.bias->want_gradient;
}

// Addends instead of sums, where a shard holds only a part of what the gradient sums over.
void ExpandBias(const Problem& p, Direction direction, ShardRange& r) {
  if (!WantsBiasGradient(p, direction)) return;
  r.expand_bias_heads = p.bias->shape.heads == 1 && r.kv_head_count < p.kv_heads;
  r.expand_bias_batch = p.bias->shape.batch == 1 && r.batch_count < p.batch;
}

Plan Costed(const Problem& p, Direction direction, std::vector<ShardRange> shards) {
  Plan plan{std::move(shards)};
  for (const ShardRange& range : plan.shards) {
    if (IsTrivial(p, range)) continue;
    MessageSizes bytes = MessageSizesOf(SubProblem(p, range), direction);
    plan.largest_message = std::max({plan.largest_message, bytes.request, bytes.reply});
    plan.total_bytes += bytes.request + bytes.reply;
  }
  return plan;
}

Plan PlanByBatch(const Problem& p, Direction direction, int64_t target) {
  auto make = [&](int64_t begin, int64_t count) {
    ShardRange range{begin, count, 0, p.kv_heads};
    ExpandBias(p, direction, range);
    return range;
  };
  std::vector<ShardRange> shards;
  Cutter(p, direction, target).Cut(p.batch, make, shards);
  return Costed(p, direction, std::move(shards));
}

void CutHeads(const Problem& p, Direction direction, int64_t target, int64_t batch_begin,
              int64_t batch_count, std::vector<ShardRange>& shards) {
  auto make = [&](int64_t begin, int64_t count) {
    ShardRange range{batch_begin, batch_count, begin, count};
    ExpandBias(p, direction, range);
    return range;
  };
  Cutter(p, direction, target).Cut(p.kv_heads, make, shards);
}

Plan PlanByHeads(const Problem& p, Direction direction, int64_t target) {
  std::vector<ShardRange> shards;
  CutHeads(p, direction, target, 0, p.batch, shards);
  return Costed(p, direction, std::move(shards));
}

Plan PlanByBatchAndHeads(const Problem& p, Direction direction, int64_t target) {
  std::vector<ShardRange> shards;
  for (int64_t b = 0; b < p.batch; ++b) CutHeads(p, direction, target, b, 1, shards);
  return Costed(p, direction, std::move(shards));
}

// The order of shards must be that of the sum: batch entries first.
bool MayCutHeadsOfWholeBatch(const Problem& p, Direction direction) {
  return !WantsBiasGradient(p, direction) || p.bias->shape.heads != 1 || p.q_heads == 1;
}

bool IsBetter(const Plan& a, const Plan& b, int64_t target) {
  int64_t over_a = std::max(a.largest_message, target),
          over_b = std::max(b.largest_message, target);
  if (over_a != over_b) return over_a < over_b;
  if (a.total_bytes != b.total_bytes) return a.total_bytes < b.total_bytes;
  return false;
}

// Bytes of the larger message of each of so many like shards.
int64_t ShareOf(const Problem& p, Direction direction, int64_t devices) {
  if (devices == 1) return INT64_MAX;
  const MessageSizes whole = MessageSizesOf(p, direction);
  const PayloadBytes payload = BytesOf(p, direction);
  return std::max(whole.request, whole.reply) -
         std::max(payload.input, payload.output) * (devices - 1) / devices;
}

// A plan of one shard becomes one of pieces by rows, one for each device; not where parts would
// have to be put together.
Plan CutForDevices(const Problem& p, Direction direction, const PlanLimits& limits, Plan plan) {
  const ShardRange& shard = plan.shards.front();
  if (plan.shards.size() > 1 || !MayCut(p, shard, direction, Cut::kRows)) return plan;
  std::vector<ShardRange> pieces = CutShard(p, shard, Cut::kRows, limits.devices, limits.steps);
  if (IsPartial(pieces.front(), direction)) return plan;
  return Costed(p, direction, std::move(pieces));
}

// One shard in pieces, as many as bring it to the target or as are worth it; itself when none are.
Plan CutFurther(const Problem& p, Direction direction, const PlanLimits& limits, int64_t target,
                const ShardRange& shard) {
  const Plan whole = Costed(p, direction, {shard});
  Plan best = whole;
  if (whole.largest_message <= target) return best;
  for (Cut cut : {Cut::kRows, Cut::kKeys}) {
    if (!MayCut(p, shard, direction, cut)) continue;
    int64_t pieces = (whole.largest_message + target - 1) / target;
    for (; pieces > 1; pieces /= 2) {
      Plan plan = Costed(p, direction, CutShard(p, shard, cut, pieces, limits.steps));
      if (!limits.merge && IsPartial(plan.shards.front(), direction)) break;
      bool worth =
          double(plan.total_bytes) <= (1 + limits.max_extra) * double(whole.total_bytes) &&
          double(plan.largest_message) <= (1 - limits.least_gain) * double(whole.largest_message);
      if (!worth) continue;
      if (IsBetter(plan, best, target)) best = std::move(plan);
      break;
    }
  }
  return best;
}

Plan CutFurther(const Problem& p, Direction direction, const PlanLimits& limits, int64_t target,
                Plan plan) {
  std::vector<ShardRange> shards;
  for (const ShardRange& shard : plan.shards) {
    Plan pieces = CutFurther(p, direction, limits, target, shard);
    shards.insert(shards.end(), pieces.shards.begin(), pieces.shards.end());
  }
  return Costed(p, direction, std::move(shards));
}

absl::Status TooLarge(const Problem& p, const Plan& plan, const PlanLimits& limits) {
  return absl::OutOfRangeError(absl::StrCat(
      "problem: expected messages of at most max_message_bytes = ", limits.max_message_bytes,
      " bytes for one batch entry and KV head with its ", p.group_size(),
      " query heads (the smallest piece that a call is cut into), got ", plan.largest_message,
      ": raise the server's limit (attnd --max_message_mib) or shorten q_len = ", p.q_len,
      " and kv_len = ", p.kv_len));
}

}  // namespace

MessageSizes MessageSizesOf(const Problem& p, Direction direction) {
  PayloadBytes payload = BytesOf(p, direction);
  int64_t numbers = p.kv_lengths.size() + p.offsets.size() + p.cu_seqlens_q.size() +
                    p.cu_seqlens_k.size() + p.alibi_slopes.size() + p.sink_logits.size();
  int64_t header = kHeaderBytes + 5 * numbers;  // a varint below 2^32 has at most 5 bytes
  if (p.mask != nullptr) header += p.mask->bytes();
  return {payload.input + header, payload.output + kHeaderBytes};
}

bool ComputesLong(const Problem& p, Direction direction) {
  constexpr double kLongFlopsPerByte = 2e4;
  const MessageSizes sizes = MessageSizesOf(p, direction);
  return Flops(p, direction) >=
         kLongFlopsPerByte * static_cast<double>(sizes.request + sizes.reply);
}

absl::StatusOr<std::vector<ShardRange>> PlanShards(const Problem& p, Direction direction,
                                                   const PlanLimits& limits) {
  const int64_t target = std::min(limits.target_bytes, limits.max_message_bytes);
  // Each device has a part of the batch entries, or of the heads.
  const int64_t of_device = std::min(target, ShareOf(p, direction, limits.devices));
  Plan best = PlanByBatch(p, direction, of_device);
  if (best.shards.size() == 1 && best.largest_message <= of_device) return std::move(best.shards);
  bool cut_entries = best.largest_message > of_device || WantsBiasGradient(p, direction);
  if (MayCutHeadsOfWholeBatch(p, direction)) {
    Plan other = PlanByHeads(p, direction, of_device);
    if (IsBetter(other, best, of_device)) best = std::move(other);
  }
  if (cut_entries) {
    Plan other = PlanByBatchAndHeads(p, direction, of_device);
    if (IsBetter(other, best, of_device)) best = std::move(other);
  }
  if (limits.devices > 1) best = CutForDevices(p, direction, limits, std::move(best));
  if (best.largest_message > target) {
    best = CutFurther(p, direction, limits, target, std::move(best));
  }
  if (best.largest_message > limits.max_message_bytes) return TooLarge(p, best, limits);
  return std::move(best.shards);
}

bool NeedsBiasGradientSum(const Problem& p, const std::vector<ShardRange>& shards) {
  if (!p.bias || !p.bias->want_gradient) return false;
  // A packed shard's shape ends at its own longest sequence: what it leaves out must become zero.
  if (IsPacked(p.layout) && shards.size() > 1) return true;
  return std::any_of(shards.begin(), shards.end(), [](const ShardRange& r) {
    return r.expand_bias_batch || r.expand_bias_heads;
  });
}

}  // namespace attnd
