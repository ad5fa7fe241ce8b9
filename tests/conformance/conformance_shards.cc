#include "tests/conformance/conformance_shards.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "attention/shard.h"
#include "client/shards/bias_gradient_sum.h"
#include "client/shards/shard_cut.h"

namespace attnd {
namespace {

AlignedBytes Part(const StridedRuns& runs, const AlignedBytes& whole) {
  if (whole.size() == 0) return {};
  AlignedBytes part(runs.total_bytes());
  Gather(runs, whole.data(), part.data());
  return part;
}

Bytes Part(const StridedRuns& runs, const Bytes& whole) {
  if (whole.empty()) return {};
  Bytes part(runs.total_bytes());
  Gather(runs, whole.data(), part.data());
  return part;
}

ProblemInputs PartOf(const ShardRuns& runs, const ProblemInputs& whole) {
  ProblemInputs part;
  part.q = Part(runs.q, whole.q);
  part.k = Part(runs.k, whole.k);
  part.v = Part(runs.v, whole.v);
  part.mask_bits = Part(runs.mask_bits, whole.mask_bits);
  part.bias = Part(runs.bias, whole.bias);
  part.d_o = Part(runs.o, whole.d_o);
  part.d_lse = Part(runs.lse, whole.d_lse);
  return part;
}

std::vector<ShardRange> AllShards(const Problem& p) {
  bool wants = p.bias && p.bias->want_gradient;
  std::vector<ShardRange> shards;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      shards.push_back({b, 1, h, 1, wants && p.bias->shape.batch == 1 && p.batch > 1,
                        wants && p.bias->shape.heads == 1 && p.q_heads > 1});
    }
  }
  return shards;
}

class ShardComparison {
 public:
  ShardComparison(Backend& backend, CallMemory& memory, const Problem& problem,
                  const ProblemInputs& inputs, const ForwardResults& forward,
                  const BackwardResults& backward)
      : backend_(backend),
        memory_(memory),
        problem_(problem),
        inputs_(inputs),
        forward_(forward),
        backward_(backward),
        shards_(AllShards(problem)),
        d_bias_(backward.d_bias.size() / sizeof(float)),
        bias_sum_(problem, shards_, d_bias_.data()) {}

  std::vector<std::string> Run() {
    for (size_t n = 0; n < shards_.size(); ++n) CompareShard(static_cast<int64_t>(n));
    if (!d_bias_.empty() &&
        std::memcmp(d_bias_.data(), backward_.d_bias.data(), backward_.d_bias.size()) != 0) {
      differences_.push_back("d_bias of the shards, added in order, has other bits");
    }
    return std::move(differences_);
  }

 private:
  void CompareShard(int64_t index) {
    const ShardRange& range = shards_[index];
    if (IsTrivial(problem_, range)) {
      if (!d_bias_.empty()) bias_sum_.Add(index, {});
      return;
    }
    Problem sub = SubProblem(problem_, range);
    ShardRuns runs = ShardRunsOf(problem_, range);
    ProblemInputs inputs = PartOf(runs, inputs_);
    LaunchItem item{&sub, &inputs, Part(runs.o, forward_.o), Part(runs.lse, forward_.lse)};
    if (!forward_.o.empty()) {
      CompareForward(range, item);
      CompareRowCuts(range);
    }
    if (!backward_.d_q.empty()) CompareBackward(index, item, runs);
  }

  // The same cut further by rows, where the engine has more than one tile of them.
  void CompareRowCuts(ShardRange range) {
    range.expand_bias_batch = range.expand_bias_heads = false;
    if (!MayCut(problem_, range, Direction::kForward, Cut::kRows)) return;
    const std::vector<ShardRange> pieces = CutShard(problem_, range, Cut::kRows, 2, CutSteps());
    if (pieces.size() < 2) return;
    for (const ShardRange& piece : pieces) {
      if (IsTrivial(problem_, piece)) continue;
      Problem sub = SubProblem(problem_, piece);
      ShardRuns runs = ShardRunsOf(problem_, piece);
      ProblemInputs inputs = PartOf(runs, inputs_);
      CompareForward(piece,
                     {&sub, &inputs, Part(runs.o, forward_.o), Part(runs.lse, forward_.lse)});
    }
  }

  void CompareForward(const ShardRange& range, const LaunchItem& item) {
    auto outcome = LaunchForward(backend_, memory_, {item});
    if (!outcome.ok()) return Differ(range, outcome.status().ToString());
    if (outcome->results[0].o != item.o) Differ(range, "o has other bits");
    if (outcome->results[0].lse != item.lse) Differ(range, "lse has other bits");
  }

  void CompareBackward(int64_t index, const LaunchItem& item, const ShardRuns& runs) {
    const ShardRange& range = shards_[index];
    auto outcome = LaunchBackward(backend_, memory_, {item});
    if (!outcome.ok()) return Differ(range, outcome.status().ToString());
    const BackwardResults& got = outcome->results[0];
    if (got.d_q != Part(runs.q, backward_.d_q)) Differ(range, "d_q has other bits");
    if (got.d_k != Part(runs.k, backward_.d_k)) Differ(range, "d_k has other bits");
    if (got.d_v != Part(runs.v, backward_.d_v)) Differ(range, "d_v has other bits");
    if (got.d_sink != Part(runs.d_sink, backward_.d_sink)) Differ(range, "d_sink has other bits");
    if (d_bias_.empty()) return;
    std::vector<float> addend(got.d_bias.size() / sizeof(float));
    std::memcpy(addend.data(), got.d_bias.data(), got.d_bias.size());
    bias_sum_.Add(index, std::move(addend));
  }

  void Differ(const ShardRange& range, const std::string& what) {
    differences_.push_back(absl::StrCat("shard of batch entry ", range.batch_begin, ", key head ",
                                        range.kv_head_begin, ", row ", range.row_begin, ": ",
                                        what));
  }

  Backend& backend_;
  CallMemory& memory_;
  const Problem& problem_;
  const ProblemInputs& inputs_;
  const ForwardResults& forward_;
  const BackwardResults& backward_;
  std::vector<ShardRange> shards_;
  std::vector<float> d_bias_;
  BiasGradientSum bias_sum_;
  std::vector<std::string> differences_;
};

}  // namespace

std::vector<std::string> CompareShards(Backend& backend, CallMemory& memory, const Problem& problem,
                                       const ProblemInputs& inputs, const ForwardResults& forward,
                                       const BackwardResults& backward) {
  return ShardComparison(backend, memory, problem, inputs, forward, backward).Run();
}

}  // namespace attnd
