#include "attention/masks/mask_tree.h"

#include <algorithm>
#include <optional>

#include "attention/masks/random_blocks.h"
#include "base/floor.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

// Sets bits [begin, end) of a row.
void SetBits(uint32_t* words, int64_t begin, int64_t end) {
  while (begin < end) {
    const int64_t word = begin / 32, stop = std::min(end, (word + 1) * 32);
    words[word] |= ~uint32_t{0} >> (32 - (stop - begin)) << begin % 32;
    begin = stop;
  }
}

// Which blocks of keys an expression holds entirely for one row of blocks.
class ExcludedBlocks {
 public:
  ExcludedBlocks(const MaskTree& tree, int64_t block, int64_t keys, CompileBudget& budget)
      : tree_(tree), walk_(tree, budget), block_(block), keys_(keys), budget_(budget) {}

  // Finds the keys that the rows of `rect` see; the keys of `rect` do not matter.
  std::vector<KeyRun> Find(const MaskRect& rect) {
    found_.clear();
    Search(0, {0, (keys_ + block_ - 1) / block_}, rect);
    return Union(std::move(found_));
  }

 private:
  void Search(size_t depth, KeyRun blocks, const MaskRect& rows) {
    if (budget_.IsSpent()) return;
    MaskRect rect = rows;
    rect.key_begin = blocks.begin * block_;
    rect.key_end = std::min(keys_, blocks.end * block_);
    const Seen seen = walk_.Classify(depth, rect);
    if (seen == Seen::kNone) return;
    const bool is_one = blocks.end - blocks.begin == 1;
    if (seen == Seen::kAll || (is_one && HoldsAll(rect))) found_.push_back(blocks);
    if (seen == Seen::kAll || is_one) return;
    const int64_t middle = (blocks.begin + blocks.end) / 2;
    Search(depth + 1, {blocks.begin, middle}, rows);
    Search(depth + 1, {middle, blocks.end}, rows);
  }
  bool HoldsAll(const MaskRect& rect) {
    for (MaskRect row = rect; row.rows > 0; ++row.query, ++row.row, --row.rows) {
      budget_.steps += static_cast<int64_t>(tree_.node_count());
      const std::vector<KeyRun> whole = {{rect.key_begin, rect.key_end}};
      if (budget_.IsSpent() || tree_.Runs(row) != whole) return false;
    }
    return true;
  }

  const MaskTree& tree_;
  MaskTreeWalk walk_;
  const int64_t block_, keys_;
  CompileBudget& budget_;
  std::vector<KeyRun> found_;
};

}  // namespace

// ---- The tree.

class MaskTreeBuilder {
 public:
  MaskTreeBuilder(const MaskSpec& spec, const MaskPlace& place, ListLeaves& lists,
                  CompileBudget& budget)
      : spec_(spec), place_(place), lists_(lists), budget_(budget) {}

  absl::StatusOr<uint32_t> Pattern(const MaskPattern& pattern) {
    if (auto* expr = std::get_if<MaskExpr>(&pattern)) return Expr(*expr);
    auto* blocks = std::get_if<BlockList>(&pattern);
    if (blocks != nullptr && blocks->partial_expr) {
      ASSIGN_OR_RETURN(const uint32_t inside, Expr(*blocks->partial_expr));
      const uint32_t partial = List(pattern, BlocksWanted::kPartial);
      const uint32_t both = Add(MaskTree::Kind::kAllOf, {partial, inside});
      return Add(MaskTree::Kind::kAnyOf, {List(pattern, BlocksWanted::kFull), both});
    }
    auto* runs = std::get_if<ColRuns>(&pattern);
    if (runs != nullptr && runs->base) {
      ASSIGN_OR_RETURN(const uint32_t base, Expr(*runs->base));
      return Add(MaskTree::Kind::kAllOf, {base, List(pattern, BlocksWanted::kBoth)});
    }
    return List(pattern, BlocksWanted::kBoth);
  }

  absl::StatusOr<uint32_t> Expr(const MaskExpr& expr) {
    if (std::holds_alternative<AllOf>(expr.op)) return Operands(MaskTree::Kind::kAllOf, expr);
    if (std::holds_alternative<AnyOf>(expr.op)) return Operands(MaskTree::Kind::kAnyOf, expr);
    if (std::holds_alternative<Negate>(expr.op)) return Operands(MaskTree::Kind::kNot, expr);
    if (std::holds_alternative<AllKeys>(expr.op)) return Add(MaskTree::Kind::kAllOf, {});
    if (auto* e = std::get_if<PatternRef>(&expr.op)) return Pattern(spec_.pattern[e->pattern]);
    if (auto* e = std::get_if<RandomBlocks>(&expr.op)) return Random(expr, *e);
    return AddLeaf(MakeExprLeaf(expr, spec_.extents, place_.batch));
  }

  MaskTree Take(uint32_t root) {
    tree_.root_ = root;
    return std::move(tree_);
  }

 private:
  uint32_t Add(MaskTree::Kind kind, std::vector<uint32_t> of) {
    ++budget_.steps;
    tree_.nodes_.push_back({kind, nullptr, std::move(of)});
    return static_cast<uint32_t>(tree_.nodes_.size() - 1);
  }
  uint32_t AddLeaf(std::shared_ptr<const MaskLeaf> leaf) {
    const uint32_t node = Add(MaskTree::Kind::kLeaf, {});
    tree_.nodes_[node].leaf = std::move(leaf);
    return node;
  }
  uint32_t List(const MaskPattern& pattern, BlocksWanted wanted) {
    std::shared_ptr<MaskLeaf>& leaf = lists_[{&pattern, wanted}];
    if (leaf == nullptr) leaf = MakeListLeaf(pattern, wanted);
    return AddLeaf(leaf);
  }
  absl::StatusOr<uint32_t> Operands(MaskTree::Kind kind, const MaskExpr& expr) {
    std::vector<uint32_t> of;
    for (const MaskExpr& operand : expr.of) {
      ASSIGN_OR_RETURN(const uint32_t node, Expr(operand));
      of.push_back(node);
    }
    return Add(kind, std::move(of));
  }

  // Rows of blocks [first, first + count) that hold the place's queries.
  absl::StatusOr<uint32_t> Random(const MaskExpr& expr, const RandomBlocks& random) {
    const int64_t block = random.block, keys = spec_.extents.keys;
    const int64_t query = place_.row_begin + place_.row_to_query;
    const int64_t first = FloorDivide(query, block);
    const int64_t count = FloorDivide(query + place_.rows - 1, block) - first + 1;
    budget_.steps += count * (int64_t{random.per_row} + 1);
    budget_.bytes += count * (int64_t{random.per_row} + 1) * 4;
    if (budget_.IsSpent()) return absl::OutOfRangeError("random");
    std::optional<MaskTree> excluded;
    if (!expr.of.empty()) {
      ASSIGN_OR_RETURN(excluded, Excluded(expr.of[0], first * block, (first + count) * block));
    }
    std::optional<ExcludedBlocks> search;
    if (excluded) search.emplace(*excluded, block, keys, budget_);
    DrawnBlocks drawn = {.block = block, .first = first, .indptr = {0}};
    for (int64_t row = first; row < first + count; ++row) {
      std::vector<KeyRun> none;
      if (search) none = search->Find(RowsOfBlocks(row * block, (row + 1) * block));
      if (budget_.IsSpent()) return absl::OutOfRangeError("random");
      std::vector<uint32_t> blocks =
          DrawRandomBlocks(random, row, place_.head, (keys + block - 1) / block, none);
      std::sort(blocks.begin(), blocks.end());
      drawn.indices.insert(drawn.indices.end(), blocks.begin(), blocks.end());
      drawn.indptr.push_back(static_cast<uint32_t>(drawn.indices.size()));
    }
    return AddLeaf(MakeDrawnLeaf(std::move(drawn)));
  }

  // Returns the rows of the extents that lie in queries [begin, end).
  MaskRect RowsOfBlocks(int64_t begin, int64_t end) const {
    begin = std::max(begin, place_.row_to_query);
    end = std::min(end, place_.row_to_query + spec_.extents.rows);
    return {begin, begin - place_.row_to_query, end - begin, 0, spec_.extents.keys};
  }
  absl::StatusOr<MaskTree> Excluded(const MaskExpr& expr, int64_t query_begin, int64_t query_end) {
    const MaskRect rows = RowsOfBlocks(query_begin, query_end);
    MaskPlace place = place_;
    place.row_begin = rows.row;
    place.rows = rows.rows;
    MaskTreeBuilder builder(spec_, place, lists_, budget_);
    ASSIGN_OR_RETURN(const uint32_t root, builder.Expr(expr));
    return builder.Take(root);
  }

  const MaskSpec& spec_;
  const MaskPlace place_;
  ListLeaves& lists_;
  CompileBudget& budget_;
  MaskTree tree_;
};

absl::StatusOr<MaskTree> MaskTree::Build(const MaskSpec& canonical, uint32_t pattern,
                                         const MaskPlace& place, ListLeaves& lists,
                                         CompileBudget& budget) {
  MaskTreeBuilder builder(canonical, place, lists, budget);
  ASSIGN_OR_RETURN(const uint32_t root, builder.Pattern(canonical.pattern[pattern]));
  return builder.Take(root);
}

std::vector<KeyRun> MaskTree::Runs(uint32_t node, const MaskRect& rect) const {
  const KeyRun whole = {rect.key_begin, rect.key_end};
  const Node& n = nodes_[node];
  std::vector<KeyRun> runs;
  switch (n.kind) {
    case Kind::kLeaf:
      n.leaf->AppendRuns(rect, runs);
      return Union(std::move(runs));
    case Kind::kNot:
      return Complement(Runs(n.of[0], rect), whole);
    case Kind::kAllOf:
      runs = {whole};
      for (uint32_t operand : n.of) runs = Intersection(runs, Runs(operand, rect));
      return runs;
    case Kind::kAnyOf:
      for (uint32_t operand : n.of) {
        const std::vector<KeyRun> more = Runs(operand, rect);
        runs.insert(runs.end(), more.begin(), more.end());
      }
      return Union(std::move(runs));
  }
  return runs;
}

// ---- The walk.

Seen MaskTreeWalk::Classify(size_t depth, const MaskRect& rect) {
  while (seen_.size() <= depth) seen_.emplace_back(tree_.nodes_.size());
  return Classify(depth, tree_.root_, rect);
}

Seen MaskTreeWalk::Classify(size_t depth, uint32_t node, const MaskRect& rect) {
  ++budget_.steps;
  // A node is looked at only below nodes that were undecided, whose operands were all looked at.
  if (depth > 0 && seen_[depth - 1][node] != Seen::kMixed) {
    return seen_[depth][node] = seen_[depth - 1][node];
  }
  return seen_[depth][node] = Evaluate(depth, tree_.nodes_[node], rect);
}

Seen MaskTreeWalk::Evaluate(size_t depth, const MaskTree::Node& node, const MaskRect& rect) {
  if (node.kind == MaskTree::Kind::kLeaf) return node.leaf->Classify(rect, budget_.steps);
  if (node.kind == MaskTree::Kind::kNot) {
    const Seen seen = Classify(depth, node.of[0], rect);
    return seen == Seen::kMixed ? seen : seen == Seen::kAll ? Seen::kNone : Seen::kAll;
  }
  const bool is_all = node.kind == MaskTree::Kind::kAllOf;
  const Seen decides = is_all ? Seen::kNone : Seen::kAll;
  Seen result = is_all ? Seen::kAll : Seen::kNone;
  for (uint32_t operand : node.of) {
    const Seen seen = Classify(depth, operand, rect);
    if (seen == decides) return decides;
    if (seen == Seen::kMixed) result = Seen::kMixed;
  }
  return result;
}

int64_t MaskTreeWalk::MixedLeaves(size_t depth, uint32_t node) const {
  if (seen_[depth][node] != Seen::kMixed) return 0;
  const MaskTree::Node& n = tree_.nodes_[node];
  if (n.kind == MaskTree::Kind::kLeaf) return 1;
  int64_t leaves = 0;
  for (uint32_t operand : n.of) leaves += MixedLeaves(depth, operand);
  return leaves;
}

bool MaskTreeWalk::Shape(size_t depth, const MaskRect& rect, std::vector<int64_t>& shape) {
  shape.assign({rect.rows, rect.keys()});
  return AppendShape(depth, tree_.root_, rect, shape);
}

// Decided operands of an undecided node change nothing: the undecided leaves and the places that
// they show make up the whole shape.
bool MaskTreeWalk::AppendShape(size_t depth, uint32_t node, const MaskRect& rect,
                               std::vector<int64_t>& shape) {
  if (seen_[depth][node] != Seen::kMixed) return true;
  ++budget_.steps;
  const MaskTree::Node& n = tree_.nodes_[node];
  if (n.kind == MaskTree::Kind::kLeaf) {
    shape.push_back(node);
    return n.leaf->AppendShape(rect, shape);
  }
  for (uint32_t operand : n.of) {
    if (!AppendShape(depth, operand, rect, shape)) return false;
  }
  return true;
}

void MaskTreeWalk::Fill(size_t depth, const MaskRect& rect, TileBits& bits) {
  Fill(depth, tree_.root_, 0, rect, bits);
  for (int64_t r = rect.rows; r < bits.rows; ++r) {
    std::fill_n(bits.Row(r), bits.words_per_row, 0);
  }
}

void MaskTreeWalk::Fill(size_t depth, uint32_t node, size_t level, const MaskRect& rect,
                        TileBits& bits) {
  const MaskTree::Node& n = tree_.nodes_[node];
  if (n.kind == MaskTree::Kind::kLeaf) return FillLeaf(*n.leaf, rect, bits);
  if (n.kind != MaskTree::Kind::kNot) return FillOperands(depth, node, level, rect, bits);
  Fill(depth, n.of[0], level, rect, bits);
  std::vector<uint32_t> whole(static_cast<size_t>(bits.words_per_row));
  SetBits(whole.data(), 0, rect.keys());
  for (int64_t r = 0; r < rect.rows; ++r) {
    for (int64_t w = 0; w < bits.words_per_row; ++w) bits.Row(r)[w] ^= whole[w];
  }
}

void MaskTreeWalk::FillLeaf(const MaskLeaf& leaf, const MaskRect& rect, TileBits& bits) {
  MaskRect rest = rect;
  while (rest.rows > 0) {
    const int64_t r = rect.rows - rest.rows;
    uint32_t* words = bits.Row(r);
    std::fill_n(words, bits.words_per_row, 0);
    runs_.clear();
    const bool is_copied = leaf.CopyRow(rest, words);
    const int64_t same = is_copied ? 1 : std::min(leaf.AppendRuns(rest, runs_), rest.rows);
    for (const KeyRun& run : runs_) {
      SetBits(words, run.begin - rect.key_begin, run.end - rect.key_begin);
    }
    for (int64_t n = 1; n < same; ++n) std::copy_n(words, bits.words_per_row, bits.Row(r + n));
    rest.query += same;
    rest.row += same;
    rest.rows -= same;
    budget_.steps += 1 + static_cast<int64_t>(runs_.size());
  }
}

// Operands that are decided change nothing.
void MaskTreeWalk::FillOperands(size_t depth, uint32_t node, size_t level, const MaskRect& rect,
                                TileBits& bits) {
  const MaskTree::Node& n = tree_.nodes_[node];
  const bool is_all = n.kind == MaskTree::Kind::kAllOf;
  const int64_t words = rect.rows * bits.words_per_row;
  bool is_first = true;
  for (uint32_t operand : n.of) {
    if (seen_[depth][operand] != Seen::kMixed) continue;
    if (is_first) {
      Fill(depth, operand, level, rect, bits);
      is_first = false;
      continue;
    }
    if (scratch_.size() <= level) scratch_.resize(level + 1);
    TileBits other = std::move(scratch_[level]);
    other.rows = bits.rows;
    other.words_per_row = bits.words_per_row;
    other.words.resize(bits.words.size());
    Fill(depth, operand, level + 1, rect, other);
    for (int64_t w = 0; w < words; ++w) {
      bits.words[w] = is_all ? bits.words[w] & other.words[w] : bits.words[w] | other.words[w];
    }
    scratch_[level] = std::move(other);
  }
}

}  // namespace attnd
