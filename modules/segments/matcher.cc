#include <set>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "modules/kept_values.h"
#include "modules/layer_schedule.h"
#include "modules/op_uses.h"
#include "modules/segments/segment.h"

namespace attnd {
namespace {

bool IsNorm(const ModuleOp& op) { return std::holds_alternative<NormOp>(op.kind); }

// Steps of an op's kernel beside a norm.
int64_t StepsOf(const ModuleOp& op, Direction direction) {
  if (IsNorm(op)) return 0;
  const bool is_binary = std::holds_alternative<BinaryOp>(op.kind);
  return is_binary && direction == Direction::kBackward ? 2 : 1;
}

absl::Status WrongSegment(int64_t first, int64_t end, const std::string& expected,
                          const std::string& got) {
  return absl::InvalidArgumentError(
      absl::StrCat("ops ", first, " to ", end, ": expected ", expected, ", got ", got));
}

}  // namespace

const char* NameOf(SegmentTemplate of) {
  constexpr const char* kNames[] = {"op", "pointwise", "rows", "product"};
  return kNames[static_cast<int>(of)];
}

SegmentMatcher::SegmentMatcher(const ModuleGraph& graph, int64_t block, Direction direction)
    : ops_(graph.layout().blocks[block].ops),
      direction_(direction),
      order_(OrderOf(graph, block)),
      last_place_(ops_.size() + kFirstOpValue, -1),
      needed_(NeededValues(graph, block)),
      holders_(GradientHolders(graph, block)) {
  for (int64_t place = 0; place < places(); ++place) {
    for (const ValueUse& use : ValuesOf(At(place))) last_place_[use.value] = place;
  }
  last_place_.back() = places();
}

absl::StatusOr<OpSegment> SegmentMatcher::Match(int64_t first, int64_t end) const {
  if (first < 0 || first >= end || end > places()) {
    return WrongSegment(first, end, absl::StrCat("places of ", places(), " ops, ascending"),
                        "others");
  }
  OpSegment segment{.first = first, .end = end};
  if (end - first == 1) return segment;
  const bool is_product = IsProduct(first, end);
  if (!is_product) RETURN_IF_ERROR(CheckChain(first, end));
  segment.of = is_product ? SegmentTemplate::kProduct : SegmentTemplate::kPointwise;
  for (int64_t place = first; place < end; ++place) {
    if (IsNorm(At(place))) segment.of = SegmentTemplate::kRows;
    if (place + 1 == end) break;
    const int64_t value = ValueAt(place);
    if (direction_ == Direction::kBackward) {
      if (IsGradientUnread(place, first, end)) segment.unread.push_back(value);
    } else if (IsUnread(place)) {
      segment.unread_alone.push_back(value);
      if (!needed_[value]) segment.unread.push_back(value);
    }
  }
  return segment;
}

bool SegmentMatcher::IsProduct(int64_t first, int64_t end) const {
  if (end - first != 2) return false;
  const bool is_forward = direction_ == Direction::kForward;
  const auto* linear = std::get_if<LinearOp>(&At(is_forward ? first : first + 1).kind);
  const auto* curve = std::get_if<ActivationOp>(&At(is_forward ? first + 1 : first).kind);
  if (linear == nullptr || curve == nullptr) return false;
  if (!is_forward) return linear->input == ValueAt(first) && IsGradientUnread(first, first, end);
  const bool joins_others = end < places() && CheckChain(first + 1, end + 1).ok();
  return curve->input == ValueAt(first) && !joins_others;
}

absl::Status SegmentMatcher::CheckChain(int64_t first, int64_t end) const {
  const auto wrong = [&](const std::string& expected, const std::string& got) {
    return WrongSegment(first, end, expected, got);
  };
  int64_t norms = 0, steps = 0;
  std::set<int64_t> read;
  for (int64_t place = first; place < end; ++place) {
    const ModuleOp& op = At(place);
    if (!IsPointwise(op)) return wrong("pointwise ops", std::string(OpName(op)));
    norms += IsNorm(op) ? 1 : 0;
    steps += StepsOf(op, direction_);
    bool reads_chain = place == first;
    for (const ValueUse& use : ValuesOf(op)) {
      if (!read.insert(use.value).second) {
        return wrong("each value read once", absl::StrCat("value ", use.value, " twice"));
      }
      reads_chain = reads_chain || use.value == ValueAt(place - 1);
    }
    if (!reads_chain) {
      return wrong("each op to read the value before", absl::StrCat("op ", order_.ops[place]));
    }
  }
  if (norms > 1) return wrong("one norm", absl::StrCat(norms));
  if (steps > kMostProgramSteps) {
    return wrong(absl::StrCat("at most ", kMostProgramSteps, " steps"), absl::StrCat(steps));
  }
  return absl::OkStatus();
}

// A norm reads its rows, and their gradient, more than once, from memory.
bool SegmentMatcher::IsUnread(int64_t place) const {
  return !IsNorm(At(place + 1)) && last_place_[ValueAt(place)] == place + 1;
}

bool SegmentMatcher::IsGradientUnread(int64_t place, int64_t first, int64_t end) const {
  const int64_t value = ValueAt(place);
  if (IsNorm(At(place))) return false;
  // The ops that made the values whose gradient lies there too read it.
  for (int64_t other = 0; other < places(); ++other) {
    const bool is_within = other >= first && other < end;
    if (!is_within && holders_[ValueAt(other)] == holders_[value]) return false;
  }
  return true;
}

std::vector<OpSegment> SegmentMatcher::All() const {
  std::vector<OpSegment> all;
  for (int64_t first = 0; first < places(); ++first) {
    // More ops make no chain of what is none.
    for (int64_t end = first + 1; end <= places(); ++end) {
      absl::StatusOr<OpSegment> segment = Match(first, end);
      if (!segment.ok()) break;
      all.push_back(*std::move(segment));
    }
  }
  return all;
}

namespace {

absl::StatusOr<std::vector<OpSegment>> SegmentsOf(const SegmentMatcher& matcher,
                                                  const SegmentEnds& ends) {
  std::vector<OpSegment> segments;
  int64_t first = 0;
  for (int64_t end : ends) {
    ASSIGN_OR_RETURN(OpSegment segment, matcher.Match(first, end));
    segments.push_back(std::move(segment));
    first = end;
  }
  if (first == matcher.places()) return segments;
  return WrongSegment(first, matcher.places(), "a segment", "none");
}

}  // namespace

absl::StatusOr<BlockScheme> SchemeOf(const ModuleGraph& graph, int64_t block,
                                     const BlockEnds& ends) {
  BlockScheme scheme;
  ASSIGN_OR_RETURN(scheme.forward,
                   SegmentsOf(SegmentMatcher(graph, block, Direction::kForward), ends.forward));
  ASSIGN_OR_RETURN(scheme.backward,
                   SegmentsOf(SegmentMatcher(graph, block, Direction::kBackward), ends.backward));
  return scheme;
}

BlockEnds SingleOps(const ModuleGraph& graph, int64_t block) {
  BlockEnds ends;
  const auto count = static_cast<int64_t>(graph.layout().blocks[block].ops.size());
  for (int64_t end = 1; end <= count; ++end) ends.forward.push_back(end);
  ends.backward = ends.forward;
  return ends;
}

}  // namespace attnd
