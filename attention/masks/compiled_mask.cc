#include "attention/masks/compiled_mask.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_nodes.h"
#include "attention/masks/mask_tree.h"
#include "attention/masks/tile_lists.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr int64_t kMostPlaces = int64_t{1} << 22;  // entries of plan_of
constexpr int64_t kProbeSteps = 10000;             // a fraction of a millisecond
constexpr double kEstimateMargin = 4;              // an estimate beyond it is a refusal
constexpr int64_t kMostEstimated = 8;              // plans that are estimated

// Lists what a plan depends on beside its pattern.
struct Dependence {
  bool diagonal = false, batch = false, head = false;
  int64_t nodes = 1;  // with those of the patterns that it refers to
};

void Merge(const Dependence& other, Dependence& into) {
  into.diagonal |= other.diagonal;
  into.batch |= other.batch;
  into.head |= other.head;
  into.nodes += other.nodes;
}

Dependence DependenceOf(const MaskExpr& expr, const std::vector<Dependence>& patterns) {
  Dependence of;
  if (auto* e = std::get_if<PatternRef>(&expr.op)) of = patterns[e->pattern];
  of.diagonal |= CountsQueries(expr);
  of.batch |= CountsBatch(expr);
  if (auto* e = std::get_if<RandomBlocks>(&expr.op)) of.head |= e->per_head;
  for (const MaskExpr& operand : expr.of) Merge(DependenceOf(operand, patterns), of);
  return of;
}

std::vector<Dependence> DependenceOf(const std::vector<MaskPattern>& patterns) {
  std::vector<Dependence> all;
  for (const MaskPattern& pattern : patterns) {
    Dependence of;
    if (const MaskExpr* expr = ExprOf(pattern)) Merge(DependenceOf(*expr, all), of);
    all.push_back(of);
  }
  return all;
}

// One plan to make, and all who will use it.
struct Job {
  uint32_t pattern;
  int64_t b, h;  // the first of them
};

// Which (b, h) share a plan: those with equal pattern, and equal diagonal, values by batch entry
// and head as far as the pattern depends on them.
class Sharing {
 public:
  Sharing(const MaskSpec& spec, const MaskOrigin& origin, const MaskCall& call)
      : spec_(spec), origin_(origin), call_(call), dependence_(DependenceOf(spec.pattern)) {
    const int64_t entries = static_cast<int64_t>(spec.pattern_of.size());
    pattern_by_batch_ = entries > std::max<int64_t>(spec.extents.q_heads, 1);
    pattern_by_head_ = entries > 1;
    const auto any = [&](auto what) {
      return std::any_of(dependence_.begin(), dependence_.end(), what);
    };
    by_batch_ = pattern_by_batch_ || any([](const Dependence& d) { return d.batch; }) ||
                (call.offsets.size() > 1 && any([](const Dependence& d) { return d.diagonal; }));
    by_head_ = pattern_by_head_ || any([](const Dependence& d) { return d.head; });
  }

  bool by_batch() const { return by_batch_; }
  bool by_head() const { return by_head_; }
  int64_t places() const { return (by_batch_ ? call_.batch : 1) * (by_head_ ? call_.q_heads : 1); }

  uint32_t PatternAt(int64_t b, int64_t h) const {
    const int64_t batch = pattern_by_batch_ ? b + origin_.batch_begin : 0;
    const int64_t head = pattern_by_head_ ? h + origin_.head_begin : 0;
    return spec_.pattern_of[static_cast<size_t>(batch * spec_.extents.q_heads + head)];
  }

  // Fills `plan_of` for each (b, h) that may differ; gives the plans to make.
  std::vector<Job> Jobs(std::vector<uint32_t>& plan_of) {
    std::map<std::tuple<uint32_t, int64_t, std::string, int64_t>, uint32_t> plans;
    std::vector<Job> jobs;
    for (int64_t b = 0; b < (by_batch_ ? call_.batch : 1); ++b) {
      const std::string values = by_batch_ ? ValuesAt(b) : "";
      for (int64_t h = 0; h < (by_head_ ? call_.q_heads : 1); ++h) {
        const uint32_t pattern = PatternAt(b, h);
        const Dependence& on = dependence_[pattern];
        const auto [found, is_new] = plans.try_emplace(
            {pattern, on.diagonal ? call_.OffsetAt(b) : 0, on.batch ? values : "", on.head ? h : 0},
            static_cast<uint32_t>(jobs.size()));
        if (is_new) jobs.push_back({pattern, b, h});
        plan_of.push_back(found->second);
      }
    }
    return jobs;
  }

  int64_t NodesOf(uint32_t pattern) const { return dependence_[pattern].nodes; }

 private:
  // Returns the values by batch entry in the mask's expressions, as bytes.
  std::string ValuesAt(int64_t b) const {
    const size_t batch = static_cast<size_t>(b + origin_.batch_begin);
    std::string values;
    for (const MaskPattern& pattern : spec_.pattern) {
      const MaskExpr* root = ExprOf(pattern);
      if (root == nullptr) continue;
      VisitNodes(*root, [&](const MaskExpr& expr) {
        if (!CountsBatch(expr)) return;
        if (auto* e = std::get_if<Prefix>(&expr.op)) absl::StrAppend(&values, e->len[batch], ",");
        if (auto* e = std::get_if<BlockWindow>(&expr.op)) {
          absl::StrAppend(&values, e->shift[batch], ",");
        }
        if (std::holds_alternative<Groups>(expr.op)) absl::StrAppend(&values, b, ",");
      });
    }
    return values;
  }

  const MaskSpec& spec_;
  const MaskOrigin& origin_;
  const MaskCall& call_;
  const std::vector<Dependence> dependence_;
  bool pattern_by_batch_, pattern_by_head_, by_batch_, by_head_;
};

absl::Status TooMuch(uint32_t pattern, absl::string_view what, int64_t most, double got) {
  return absl::OutOfRangeError(
      absl::StrCat("problem.mask.pattern[", pattern, "]: expected at most ", most, " ", what,
                   " to compile, got about ", static_cast<int64_t>(std::min(got, 9e18)),
                   "; fewer patterns, fewer nodes, or block lists cost less"));
}

class Compiler {
 public:
  Compiler(const MaskSpec& spec, const MaskOrigin& origin, const MaskCall& call,
           const MaskCompileOptions& options)
      : spec_(spec), origin_(origin), call_(call), options_(options) {
    budget_ = {.max_steps = options.max_steps, .max_bytes = options.max_bytes};
  }

  // Refuses what is far beyond the limits before anything is done for it.
  absl::Status CheckEstimate(const std::vector<Job>& jobs) {
    const int64_t count = static_cast<int64_t>(jobs.size());
    const int64_t looked_at = std::min(count, kMostEstimated);
    CompileEstimate sum;
    uint32_t worst = jobs[0].pattern;
    double most = -1;
    for (int64_t n = 0; n < looked_at; ++n) {
      const Job& job = jobs[static_cast<size_t>(n * count / looked_at)];
      ASSIGN_OR_RETURN(const MaskTree* tree, TreeOf(job));
      const CompileEstimate one = EstimateTiles(*tree, GridOf(job), kProbeSteps / looked_at);
      sum.steps += one.steps;
      sum.bytes += one.bytes;
      if (one.steps > most) worst = job.pattern;
      most = std::max(most, one.steps);
    }
    const double scale = static_cast<double>(count) / static_cast<double>(looked_at);
    if (sum.steps * scale > kEstimateMargin * static_cast<double>(options_.max_steps)) {
      return TooMuch(worst, "steps", options_.max_steps, sum.steps * scale);
    }
    if (sum.bytes * scale > kEstimateMargin * static_cast<double>(options_.max_bytes)) {
      return TooMuch(worst, "bytes", options_.max_bytes, sum.bytes * scale);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<MaskPlan> Compile(const Job& job) {
    ASSIGN_OR_RETURN(const MaskTree* tree, TreeOf(job));
    const TileGrid grid = GridOf(job);
    budget_.bytes +=
        (grid.row_tiles() + grid.key_tiles() + (options_.row_keys ? grid.rows : 0)) * 4;
    if (budget_.IsSpent()) return Spent(job.pattern);
    MaskPlan plan = CompileTiles(*tree, grid, budget_);
    if (budget_.IsSpent()) return Spent(job.pattern);
    if (options_.row_keys) {
      for (int64_t row = 0; row < plan.rows; ++row) {
        plan.row_keys.push_back(static_cast<uint32_t>(plan.CountVisible(row, 0, plan.keys)));
      }
    }
    if (!options_.by_rows) plan.by_rows = {};
    if (!options_.by_keys) plan.by_keys = {};
    return plan;
  }

  absl::StatusOr<std::vector<std::vector<KeyRun>>> Runs(const Job& job) {
    ASSIGN_OR_RETURN(const MaskTree* tree, TreeOf(job));
    const TileGrid grid = GridOf(job);
    std::vector<std::vector<KeyRun>> runs;
    for (int64_t row = 0; row < call_.rows; ++row) {
      const MaskRect rect = {grid.query + row, grid.row + row, 1, grid.key_begin,
                             grid.key_begin + grid.keys};
      runs.push_back(tree->Runs(rect));
      for (KeyRun& run : runs.back()) run = {run.begin - grid.key_begin, run.end - grid.key_begin};
      budget_.steps += static_cast<int64_t>(tree->node_count() + runs.back().size());
      if (budget_.IsSpent()) return Spent(job.pattern);
    }
    return runs;
  }

  int64_t steps() const { return budget_.steps; }

 private:
  absl::Status Spent(uint32_t pattern) const {
    if (budget_.steps > budget_.max_steps) {
      return TooMuch(pattern, "steps", budget_.max_steps, static_cast<double>(budget_.steps));
    }
    return TooMuch(pattern, "bytes", budget_.max_bytes, static_cast<double>(budget_.bytes));
  }

  // The last tree is kept: a mask of one plan builds it once, for estimate and work.
  absl::StatusOr<const MaskTree*> TreeOf(const Job& job) {
    if (tree_ && tree_of_.pattern == job.pattern && tree_of_.b == job.b && tree_of_.h == job.h) {
      return &*tree_;
    }
    const MaskPlace place = {.batch = job.b + origin_.batch_begin,
                             .head = job.h + origin_.head_begin,
                             .row_to_query = RowToQuery(job),
                             .row_begin = origin_.row_begin,
                             .rows = call_.rows};
    auto tree = MaskTree::Build(spec_, job.pattern, place, lists_, budget_);
    if (!tree.ok()) return Spent(job.pattern);
    tree_ = *std::move(tree);
    tree_of_ = job;
    return &*tree_;
  }

  int64_t RowToQuery(const Job& job) const {
    return call_.OffsetAt(job.b) + origin_.key_begin - origin_.row_begin;
  }
  TileGrid GridOf(const Job& job) const {
    return {.tile = options_.tile,
            .query = origin_.row_begin + RowToQuery(job),
            .row = origin_.row_begin,
            .key_begin = origin_.key_begin,
            .rows = call_.rows,
            .keys = call_.keys};
  }

  const MaskSpec& spec_;
  const MaskOrigin& origin_;
  const MaskCall& call_;
  const MaskCompileOptions& options_;
  CompileBudget budget_;
  ListLeaves lists_;
  std::optional<MaskTree> tree_;
  Job tree_of_ = {};
};

}  // namespace

absl::StatusOr<CompiledMask> CompiledMask::Make(const MaskDescription& mask,
                                                const MaskOrigin& origin, const MaskCall& call,
                                                const MaskCompileOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const MaskTileSize& tile = options.tile;
  CHECK(tile.rows >= 1 && tile.rows <= kMaxMaskTile && tile.keys >= 1 && tile.keys <= kMaxMaskTile)
      << tile.rows << " x " << tile.keys;
  RETURN_IF_ERROR(ValidatePlace(mask.spec(), origin, call));
  Sharing sharing(mask.spec(), origin, call);
  if (sharing.places() > kMostPlaces) {
    return TooMuch(0, "batch entries and heads that may differ", kMostPlaces,
                   static_cast<double>(sharing.places()));
  }
  CompiledMask compiled;
  compiled.head_stride_ = sharing.by_head() ? 1 : 0;
  compiled.batch_stride_ = sharing.by_batch() ? (sharing.by_head() ? call.q_heads : 1) : 0;
  const std::vector<Job> jobs = sharing.Jobs(compiled.plan_of_);
  int64_t nodes = 0;
  for (const Job& job : jobs) nodes += sharing.NodesOf(job.pattern);
  if (nodes > options.max_steps) {
    return TooMuch(jobs[0].pattern, "steps", options.max_steps, static_cast<double>(nodes));
  }
  Compiler compiler(mask.spec(), origin, call, options);
  RETURN_IF_ERROR(compiler.CheckEstimate(jobs));
  for (const Job& job : jobs) {
    ASSIGN_OR_RETURN(MaskPlan plan, compiler.Compile(job));
    compiled.bytes_ += plan.bytes();
    compiled.plans_.push_back(std::move(plan));
  }
  compiled.bytes_ += static_cast<int64_t>(compiled.plan_of_.size() * 4);
  compiled.steps_ = compiler.steps();
  compiled.compile_nanoseconds_ =
      std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
  return compiled;
}

absl::StatusOr<std::vector<std::vector<KeyRun>>> MaskRuns(const MaskDescription& mask,
                                                          const MaskOrigin& origin,
                                                          const MaskCall& call, int64_t b,
                                                          int64_t h, int64_t max_steps) {
  RETURN_IF_ERROR(ValidatePlace(mask.spec(), origin, call));
  const MaskCompileOptions options = {.max_steps = max_steps};
  const Sharing sharing(mask.spec(), origin, call);
  return Compiler(mask.spec(), origin, call, options).Runs({sharing.PatternAt(b, h), b, h});
}

}  // namespace attnd
