// OpSegment: ops of a layer that one kernel computes, the same bits as op by op: places [first,
// end) of OpOrder, in one direction. MatchSegment says which are legal.
//
//   kOp         one op, by the launches that it has alone
//   kPointwise  a chain of pointwise ops: each reads the value of the one before
//   kRows       such a chain with one norm in it, which sees whole rows
//   kProduct    a linear op and an activation: forward one that reads its output, backward one that
//               makes its input
//
// Legal is a chain of pointwise ops in which no value is read twice, of at most kMostProgramSteps
// steps and one norm, which is no step; in backward a sum or product is two, one for each operand.
// A value within may be read outside too: it is written then. Attention stands alone, and so does a
// product whose activation pointwise ops follow: those are better joined with each other.
//
// Errors     InvalidArgument "ops 2 to 4: expected ..., got ...".
// Values and pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "modules/graph.h"
#include "modules/op_order.h"

namespace attnd {

inline constexpr int64_t kMostProgramSteps = 8;

enum class SegmentTemplate : uint8_t { kOp, kPointwise, kRows, kProduct };
const char* NameOf(SegmentTemplate of);  // "op", "pointwise", "rows", "product"

struct OpSegment {
  int64_t first = 0, end = 0;  // places in OpOrder
  SegmentTemplate of = SegmentTemplate::kOp;
  // Values that need not be written, or in backward values whose gradients need not be: nothing
  // outside the segment reads them. And those of a forward that no backward follows: there are
  // more.
  std::vector<int64_t> unread, unread_alone;
};

// Finds the legal segments of one block in one direction.
class SegmentMatcher {
 public:
  // The graph outlives the object.
  SegmentMatcher(const ModuleGraph& graph, int64_t block, Direction direction);

  absl::StatusOr<OpSegment> Match(int64_t first, int64_t end) const;
  std::vector<OpSegment> All() const;
  int64_t places() const { return static_cast<int64_t>(order_.ops.size()); }
  const OpOrder& order() const { return order_; }

 private:
  const ModuleOp& At(int64_t place) const { return ops_[order_.ops[place]]; }
  int64_t ValueAt(int64_t place) const { return order_.ops[place] + kFirstOpValue; }
  absl::Status CheckChain(int64_t first, int64_t end) const;
  bool IsProduct(int64_t first, int64_t end) const;
  bool IsUnread(int64_t place) const;
  bool IsGradientUnread(int64_t place, int64_t first, int64_t end) const;

  const std::vector<ModuleOp>& ops_;
  const Direction direction_;
  const OpOrder order_;
  std::vector<int64_t> last_place_;  // [ops + 2]: of the ops that read each value; places(): output
  std::vector<bool> needed_;         // [ops + 2]: backward reads the value itself
  std::vector<int64_t> holders_;     // [ops + 2]: GradientHolders
};

// How a block is cut in one direction: where each segment ends, ascending, the last at the number
// of ops. Segments follow from it, so that none can say more than is legal.
using SegmentEnds = std::vector<int64_t>;
struct BlockScheme {
  std::vector<OpSegment> forward, backward;  // both in the order of forward
};
struct BlockEnds {
  SegmentEnds forward, backward;
};
absl::StatusOr<BlockScheme> SchemeOf(const ModuleGraph& graph, int64_t block,
                                     const BlockEnds& ends);

// Op by op.
BlockEnds SingleOps(const ModuleGraph& graph, int64_t block);

}  // namespace attnd
