#include "kernels/layers/cuda/plan_search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <tuple>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "kernels/cuda/library/kernel_cache.h"
#include "kernels/dense/dense_params.h"
#include "modules/op_uses.h"
#include "modules/segments/search.h"

namespace attnd {
namespace {

constexpr double kMargin = 0.02;  // that a candidate has to win

// Times that are no numbers never win.
bool Wins(double candidate, double over) { return candidate < (1 - kMargin) * over; }

// One part of a layer, and what its products may take instead.
struct Knob {
  SegmentPart part;
  std::vector<ProductKey> keys;
  ProductChoice candidate;  // of all of them
  double bound = 0;         // microseconds, of the part
};

class BlockSearch {
 public:
  BlockSearch(PartSampler& sampler, const ModuleGraph& graph, int64_t block, const RowCounts& rows,
              const GpuRates& gpu)
      : sampler_(sampler),
        graph_(graph),
        block_(block),
        rows_(rows),
        gpu_(gpu),
        ops_(graph.layout().blocks[block].ops),
        order_(OrderOf(graph, block)) {
    tuning_.rows_bucket = RowsBucket(rows.input);
    choice_.ends = BoundScheme(graph, block, rows, gpu);
  }

  absl::StatusOr<BlockChoice> Run() {
    RETURN_IF_ERROR(ChooseScheme(Direction::kForward, choice_.ends.forward));
    if (sampler_.bench().trains()) {
      RETURN_IF_ERROR(ChooseScheme(Direction::kBackward, choice_.ends.backward));
    }
    RETURN_IF_ERROR(ChooseProducts());
    choice_.products = tuning_.products;
    return choice_;
  }

 private:
  // ---- Which ops are one kernel.
  absl::Status ChooseScheme(Direction direction, SegmentEnds& chosen);
  SegmentPart PartOf(Direction direction, std::vector<OpSegment> segments) const {
    return {block_, direction, std::move(segments)};
  }

  // ---- What products take.
  absl::Status ChooseProducts();
  absl::Status AddKnobs(Direction direction, const std::vector<OpSegment>& segments,
                        std::vector<Knob>& knobs);
  bool IsProduct(const OpSegment& segment) const {
    return segment.of == SegmentTemplate::kProduct ||
           std::holds_alternative<LinearOp>(ops_[order_.ops[segment.first]].kind);
  }
  absl::Status Try(const Knob& knob);
  double BoundOf(const SegmentPart& part) const;

  PartSampler& sampler_;
  const ModuleGraph& graph_;
  const int64_t block_;
  const RowCounts rows_;
  const GpuRates gpu_;
  const std::vector<ModuleOp>& ops_;
  const OpOrder order_;
  ProductTuning tuning_;
  BlockChoice choice_;
};

absl::Status BlockSearch::ChooseScheme(Direction direction, SegmentEnds& chosen) {
  const SegmentMatcher matcher(graph_, block_, direction);
  const std::vector<CostedSegment> bounds = BoundCosts(graph_, block_, direction, rows_, gpu_);
  const std::vector<bool> lone = LonePlaces(matcher.places(), bounds);
  // The segments of a scheme where there is a choice.
  const auto part_of = [&](const SegmentEnds& ends) -> absl::StatusOr<SegmentPart> {
    SegmentPart part = PartOf(direction, {});
    int64_t first = 0;
    for (int64_t end : ends) {
      ASSIGN_OR_RETURN(OpSegment segment, matcher.Match(first, end));
      if (!lone[first]) part.segments.push_back(std::move(segment));
      first = end;
    }
    return part;
  };
  absl::Status status;
  const MeasureSegment measure = [&](int64_t first, int64_t end) -> std::optional<double> {
    absl::StatusOr<OpSegment> segment = matcher.Match(first, end);
    status.Update(segment.status());
    if (!status.ok()) return std::nullopt;
    const SegmentPart part = PartOf(direction, {*std::move(segment)});
    const PartSampler::Candidate candidate = {part, tuning_};
    const absl::StatusOr<std::vector<double>> took = sampler_.Measure({&candidate, 1});
    status.Update(took.status());
    if (!status.ok() || took->empty()) return std::nullopt;
    return took->front();
  };
  const SegmentEnds best = SearchScheme(matcher.places(), bounds, measure);
  RETURN_IF_ERROR(status);
  if (best == chosen) return absl::OkStatus();
  ASSIGN_OR_RETURN(const SegmentPart by_bounds, part_of(chosen));
  ASSIGN_OR_RETURN(const SegmentPart measured, part_of(best));
  const PartSampler::Candidate both[] = {{by_bounds, tuning_}, {measured, tuning_}};
  ASSIGN_OR_RETURN(const std::vector<double> took, sampler_.Measure(both));
  if (!took.empty() && Wins(took[1], took[0])) chosen = best;
  return absl::OkStatus();
}

double BlockSearch::BoundOf(const SegmentPart& part) const {
  const BlockWork work(graph_, block_, part.direction, rows_);
  SegmentWork sum;
  for (const OpSegment& segment : part.segments) sum += work.Of(segment);
  return sum.Microseconds(gpu_);
}

absl::Status BlockSearch::AddKnobs(Direction direction, const std::vector<OpSegment>& segments,
                                   std::vector<Knob>& knobs) {
  std::vector<std::pair<OpSegment, ProductKey>> wide;  // products in wide tiles
  std::set<ProductKey> sized;
  for (const OpSegment& segment : segments) {
    if (!IsProduct(segment)) continue;
    const SegmentPart alone = PartOf(direction, {segment});
    ASSIGN_OR_RETURN(const ProductLog log, sampler_.bench().ProductsOf(alone));
    for (const auto& [key, is_small] : log.sized) {
      if (!sized.insert(key).second) continue;
      knobs.push_back({.part = alone, .keys = {key}, .candidate = {.small = !is_small}});
    }
    for (const ProductLog::Group& group : log.groups) {
      if (group.gradient_columns == 0) wide.emplace_back(segment, group.keys.front());
    }
  }
  // Groups form where segments follow each other.
  const SegmentPart all = PartOf(direction, segments);
  ASSIGN_OR_RETURN(const ProductLog log, sampler_.bench().ProductsOf(all));
  std::set<std::vector<ProductKey>> groups;
  for (const ProductLog::Group& group : log.groups) {
    if (!groups.insert(group.keys).second) continue;
    if (group.gradient_columns != 0) {
      const int32_t other = group.gradient_columns == kWideGradientColumns ? kNarrowGradientColumns
                                                                           : kWideGradientColumns;
      knobs.push_back(
          {.part = all, .keys = {group.keys.front()}, .candidate = {.gradient_columns = other}});
    } else if (group.keys.size() > 1) {
      const auto first =
          std::search(wide.begin(), wide.end(), group.keys.begin(), group.keys.end(),
                      [](const auto& product, const auto& key) { return product.second == key; });
      if (first == wide.end()) continue;
      Knob knob = {.part = PartOf(direction, {}), .keys = group.keys, .candidate = {.apart = true}};
      for (size_t n = 0; n < group.keys.size(); ++n) {
        knob.part.segments.push_back(first[static_cast<int64_t>(n)].first);
      }
      knobs.push_back(std::move(knob));
    }
  }
  return absl::OkStatus();
}

absl::Status BlockSearch::Try(const Knob& knob) {
  ProductTuning with = tuning_;
  for (const ProductKey& key : knob.keys) {
    ProductChoice& of = with.products[key];
    if (knob.candidate.small.has_value()) of.small = knob.candidate.small;
    if (knob.candidate.gradient_columns != 0) {
      of.gradient_columns = knob.candidate.gradient_columns;
    }
    of.apart = of.apart || knob.candidate.apart;
  }
  const PartSampler::Candidate both[] = {{knob.part, tuning_}, {knob.part, with}};
  ASSIGN_OR_RETURN(const std::vector<double> took, sampler_.Measure(both));
  if (!took.empty() && Wins(took[1], took[0])) tuning_ = std::move(with);
  return absl::OkStatus();
}

// Those that take longest first.
absl::Status BlockSearch::ChooseProducts() {
  ASSIGN_OR_RETURN(const BlockScheme scheme, SchemeOf(graph_, block_, choice_.ends));
  std::vector<Knob> knobs;
  RETURN_IF_ERROR(AddKnobs(Direction::kForward, scheme.forward, knobs));
  if (sampler_.bench().trains()) {
    RETURN_IF_ERROR(AddKnobs(Direction::kBackward, scheme.backward, knobs));
  }
  for (Knob& knob : knobs) knob.bound = BoundOf(knob.part);
  std::stable_sort(knobs.begin(), knobs.end(),
                   [](const Knob& a, const Knob& b) { return a.bound > b.bound; });
  for (const Knob& knob : knobs) RETURN_IF_ERROR(Try(knob));
  return absl::OkStatus();
}

// Says all that decides how long a block takes.
std::string TextOf(const ModuleGraph& graph, int64_t block) {
  const ModuleLayout& layout = graph.layout();
  const BlockShapes& shapes = graph.shapes(block);
  std::string text = absl::StrCat("elements ", static_cast<int>(layout.element), " ",
                                  static_cast<int>(layout.wide_element), " ",
                                  static_cast<int>(layout.parameter_element), "\n");
  for (const ValueShape& shape : shapes.values) {
    absl::StrAppend(&text, static_cast<int>(shape.rows), " ", shape.columns, " ", shape.wide, "\n");
  }
  for (const ModuleOp& op : layout.blocks[block].ops) {
    absl::StrAppend(&text, OpName(op));
    for (const ValueUse& use : ValuesOf(op)) absl::StrAppend(&text, " ", use.field, use.value);
    for (const ParameterUse& use : ParametersOf(op)) {
      absl::StrAppend(&text, " ", use.field, use.parameter, ":",
                      absl::StrJoin(layout.blocks[block].parameters[use.parameter].shape, "x"));
    }
    if (const auto* linear = std::get_if<LinearOp>(&op.kind)) {
      absl::StrAppend(&text, linear->transposed ? " transposed" : "");
    } else if (const auto* curve = std::get_if<ActivationOp>(&op.kind)) {
      absl::StrAppend(&text, " curve ", static_cast<int>(curve->kind));
    } else if (const auto* drop = std::get_if<DropoutOp>(&op.kind)) {
      absl::StrAppend(&text, " drop ", drop->threshold);
    } else if (const auto* norm = std::get_if<NormOp>(&op.kind)) {
      absl::StrAppend(&text, " norm ", static_cast<int>(norm->kind));
    } else if (const auto* sum = std::get_if<BinaryOp>(&op.kind)) {
      absl::StrAppend(&text, " binary ", static_cast<int>(sum->kind), " ", sum->b_scale);
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

// Rows of a run: those of InstanceProbe.
RowCounts RowsOf(const ModuleLimits& limits) {
  if (limits.kept_rows == 0) return {limits.max_rows, limits.max_memory_rows};
  return {std::min(limits.max_rows, limits.kept_rows),
          std::min(limits.max_memory_rows, limits.kept_memory_rows)};
}

bool IsUsed(const ModuleGraph& graph, int64_t block) {
  const std::vector<ModuleLayer>& layers = graph.layout().layers;
  return std::any_of(layers.begin(), layers.end(),
                     [block](const ModuleLayer& layer) { return layer.block == block; });
}

}  // namespace

double PartSampler::MonotonicNow() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

bool PartSampler::HasBudgetFor(size_t samples) const {
  return samples_ + static_cast<int>(samples) <= budget_.samples && seconds() < budget_.seconds;
}

absl::StatusOr<std::vector<double>> PartSampler::Measure(absl::Span<const Candidate> candidates) {
  if (!HasBudgetFor(candidates.size())) return std::vector<double>();
  samples_ += static_cast<int>(candidates.size());
  std::vector<int> times;
  for (const Candidate& of : candidates) {
    ASSIGN_OR_RETURN(const double once, bench_.Seconds(of.part, of.tuning, 1));
    const double fit = std::floor(kRunSeconds / once);
    times.push_back(fit > 1 ? static_cast<int>(std::min(fit, kMostTimes)) : 1);
  }
  std::vector<std::vector<double>> runs(candidates.size());
  for (int run = 0; run < kRuns; ++run) {
    for (size_t n = 0; n < candidates.size(); ++n) {
      if (seconds() >= budget_.seconds) return std::vector<double>();
      ASSIGN_OR_RETURN(const double seconds,
                       bench_.Seconds(candidates[n].part, candidates[n].tuning, times[n]));
      runs[n].push_back(seconds * 1e6 / times[n]);
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& of : runs) {
    const bool are_times = std::all_of(of.begin(), of.end(), [](double t) { return t >= 0; });
    if (are_times) std::sort(of.begin(), of.end());
    medians.push_back(are_times ? of[kRuns / 2] : std::nan(""));
  }
  return medians;
}

absl::StatusOr<BlockChoice> SearchBlock(PartSampler& sampler, const ModuleGraph& graph,
                                        int64_t block, const RowCounts& rows, const GpuRates& gpu) {
  return BlockSearch(sampler, graph, block, rows, gpu).Run();
}

std::string PlanSearch::KeyOf(const ModuleGraph& graph, int64_t block,
                              const ModuleLimits& limits) const {
  const RowCounts rows = RowsOf(limits);
  return HashText(absl::StrCat("1\n", gpu_, "\nrows ", RowsBucket(rows.input), " ",
                               RowsBucket(rows.memory), limits.kept_rows > 0 ? " kept\n" : "\n",
                               TextOf(graph, block)));
}

std::optional<BlockChoice> PlanSearch::Kept(const ModuleGraph& graph, int64_t block,
                                            const std::string& key) const {
  std::optional<BlockChoice> kept;
  if (cache_ != nullptr) kept = cache_->Get(key);
  if (kept.has_value() && !SchemeOf(graph, block, kept->ends).ok()) kept.reset();
  return kept;
}

absl::StatusOr<PlanSearch::Choice> PlanSearch::Choose(const ModuleGraph& graph,
                                                      const ModuleLimits& limits,
                                                      const MakeBench& make_bench) {
  const RowCounts rows = RowsOf(limits);
  Choice choice = {CutsOf(Fusion::kBound, graph, rows, rates_), {RowsBucket(rows.input), {}}};
  const absl::MutexLock lock(&measuring_);
  SearchTotals took;
  std::unique_ptr<SegmentBench> bench;
  std::optional<PartSampler> sampler;
  for (size_t block = 0; block < choice.blocks.size(); ++block) {
    if (!IsUsed(graph, static_cast<int64_t>(block))) continue;
    const std::string key = KeyOf(graph, static_cast<int64_t>(block), limits);
    std::optional<BlockChoice> of_block = Kept(graph, static_cast<int64_t>(block), key);
    if (of_block.has_value()) {
      ++took.kept_blocks;
    } else {
      if (bench == nullptr) {
        ASSIGN_OR_RETURN(bench, make_bench());
        sampler.emplace(*bench, budget_, now_);
      }
      ASSIGN_OR_RETURN(of_block,
                       SearchBlock(*sampler, graph, static_cast<int64_t>(block), rows, rates_));
      ++took.searched_blocks;
      // A cache that cannot be written costs the next start a search, nothing else.
      if (cache_ != nullptr) cache_->Put(key, *of_block).IgnoreError();
    }
    choice.blocks[block] = of_block->ends;
    choice.tuning.products.insert(of_block->products.begin(), of_block->products.end());
  }
  if (bench != nullptr) RETURN_IF_ERROR(bench->Finish());
  const absl::MutexLock of_totals(&mutex_);
  totals_.kept_blocks += took.kept_blocks;
  totals_.searched_blocks += took.searched_blocks;
  if (sampler.has_value()) {
    totals_.samples += sampler->samples();
    totals_.seconds += sampler->seconds();
  }
  return choice;
}

SearchTotals PlanSearch::totals() const {
  const absl::MutexLock lock(&mutex_);
  return totals_;
}

}  // namespace attnd
