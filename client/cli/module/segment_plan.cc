#include "client/cli/module/segment_plan.h"

#include <iostream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "client/cli/json_text.h"
#include "client/cli/problem_flags.h"
#include "client/cli/table.h"
#include "modules/call_rows.h"
#include "modules/graph.h"
#include "modules/op_uses.h"
#include "modules/segments/bound.h"
#include "modules/segments/scheme.h"

namespace attnd {
namespace {

using PlanJson = nlohmann::ordered_json;

std::string MicrosecondsText(double microseconds) { return absl::StrFormat("%.1f", microseconds); }

// A block in one direction, for so many rows.
class PlannedBlock {
 public:
  PlannedBlock(const ModuleGraph& graph, int64_t block, Direction direction,
               const RowCounts& counts, const BlockEnds& ends, const GpuRates& gpu)
      : ops_(graph.layout().blocks[block].ops),
        matcher_(graph, block, direction),
        json_({{"rows", counts.input},
               {"block", block},
               {"direction", direction == Direction::kForward ? "forward" : "backward"}}) {
    const BlockWork work(graph, block, direction, counts);
    int64_t first = 0;
    for (int64_t end : direction == Direction::kForward ? ends.forward : ends.backward) {
      const OpSegment segment = *matcher_.Match(first, end);
      SegmentWork alone;
      double alone_us = 0;
      for (int64_t place = first; place < end; ++place) {
        const SegmentWork op = work.Of(*matcher_.Match(place, place + 1));
        alone += op;
        alone_us += op.Microseconds(gpu);
      }
      Add(segment, work.Of(segment), alone, gpu, alone_us);
      first = end;
    }
    json_["bound_us"] = bound_us_;
    json_["launches"] = all_.launches;
    json_["launches_saved"] = all_alone_.launches - all_.launches;
    json_["bytes_saved"] = all_alone_.bytes - all_.bytes;
    json_["us_saved"] = alone_us_ - bound_us_;
  }

  const PlanJson& json() const { return json_; }

  void AddTo(Table& table) const {
    const auto text = [this](const char* field) {
      return absl::StrCat(json_[field].get<int64_t>());
    };
    const std::string direction = json_["direction"];
    for (const PlanJson& segment : json_["segments"]) {
      const std::vector<std::string> ops = segment["ops"];
      table.Add({text("rows"), text("block"), direction, absl::StrJoin(ops, " + "),
                 segment["template"].get<std::string>(), MicrosecondsText(segment["bound_us"]),
                 absl::StrCat(segment["launches"].get<int64_t>()),
                 absl::StrCat(segment["launches_saved"].get<int64_t>()),
                 BytesText(segment["bytes_saved"])});
    }
    table.Add({text("rows"), text("block"), direction, "all but attention", "",
               MicrosecondsText(bound_us_), text("launches"), text("launches_saved"),
               BytesText(json_["bytes_saved"])});
  }

 private:
  void Add(const OpSegment& segment, const SegmentWork& work, const SegmentWork& alone,
           const GpuRates& gpu, double alone_us) {
    std::vector<std::string> ops;
    for (int64_t place = segment.first; place < segment.end; ++place) {
      ops.emplace_back(OpName(ops_[matcher_.order().ops[place]]));
    }
    // Attention's time depends on masks and lengths, and it is never joined.
    const bool is_attention = ops.front() == "attention";
    json_["segments"].push_back({{"ops", ops},
                                 {"template", NameOf(segment.of)},
                                 {"bound_us", is_attention ? 0 : work.Microseconds(gpu)},
                                 {"launches", is_attention ? 0 : work.launches},
                                 {"launches_saved", alone.launches - work.launches},
                                 {"bytes", is_attention ? 0 : work.bytes},
                                 {"bytes_saved", alone.bytes - work.bytes}});
    if (is_attention) return;
    bound_us_ += work.Microseconds(gpu);
    alone_us_ += alone_us;
    all_ += work;
    all_alone_ += alone;
  }

  const std::vector<ModuleOp>& ops_;
  const SegmentMatcher matcher_;
  PlanJson json_;
  double bound_us_ = 0, alone_us_ = 0;
  SegmentWork all_, all_alone_;
};

}  // namespace

absl::Status PrintSegmentPlan(const Session& session, ModuleLayout layout,
                              const SegmentPlanFlags& flags) {
  ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ParseNumbers("--rows", flags.rows, ','));
  for (int64_t count : rows) {
    if (count < 1 || count > kMaxCallRows) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rows: expected numbers up to ", kMaxCallRows, ", got ", flags.rows));
    }
  }
  const GpuRates* gpu = GpuNamed(flags.gpu);
  if (gpu == nullptr) {
    std::vector<std::string> names;
    for (const GpuRates& known : KnownGpus()) names.push_back(known.name);
    return absl::InvalidArgumentError(
        absl::StrCat("--gpu: expected ", absl::StrJoin(names, ", "), ", got ", flags.gpu));
  }
  ASSIGN_OR_RETURN(const ModuleGraph graph, ModuleGraph::Make(std::move(layout)));
  PlanJson plans = PlanJson::array();
  Table table({"rows", "block", "direction", "ops", "template", "bound us", "launches",
               "launches saved", "bytes saved"});
  for (int64_t count : rows) {
    const RowCounts counts = {count, graph.layout().memory_width > 0 ? count : 0};
    for (size_t block = 0; block < graph.layout().blocks.size(); ++block) {
      const BlockEnds ends = BoundScheme(graph, block, counts, *gpu);
      for (Direction direction : {Direction::kForward, Direction::kBackward}) {
        const PlannedBlock planned(graph, block, direction, counts, ends, *gpu);
        plans.push_back(planned.json());
        planned.AddTo(table);
      }
    }
  }
  if (session.json()) {
    std::cout << JsonText({{"gpu", gpu->name}, {"plans", plans}}) << "\n";
  } else {
    table.Print(std::cout, session.color());
  }
  return absl::OkStatus();
}

}  // namespace attnd
