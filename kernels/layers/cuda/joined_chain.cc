#include "kernels/layers/cuda/joined_chain.h"

#include <algorithm>
#include <set>
#include <utility>

#include "kernels/cuda/layout/descriptors.h"

namespace attnd {
namespace {

const NormDesc* NormOf(const ChainLink& link) { return std::get_if<NormDesc>(&link); }

const DenseTensor& OutOf(const ChainLink& link) {
  const NormDesc* norm = NormOf(link);
  return norm != nullptr ? norm->out : std::get<NumbersDesc>(link).out;
}

// The vectors that a norm reads.
const DenseTensor& RowsOf(const NormDesc& norm) { return norm.is_backward != 0 ? norm.dy : norm.x; }

const DenseTensor& InOf(const ChainLink& link) {
  const NormDesc* norm = NormOf(link);
  return norm != nullptr ? RowsOf(*norm) : std::get<NumbersDesc>(link).a;
}

bool Reads(const ChainLink& link, const void* data) {
  if (InOf(link).data == data) return true;
  const auto* numbers = std::get_if<NumbersDesc>(&link);
  return numbers != nullptr && numbers->b.data == data;
}

class Joining {
 public:
  Joining(std::vector<ChainLink> links, absl::Span<const void* const> unread)
      : links_(std::move(links)), unread_(unread.begin(), unread.end()) {}

  std::optional<JoinedChain> Join() {
    if (links_.empty() || !FindShape()) return std::nullopt;
    joined_.chain.in = InOf(links_.front());
    const void* current = joined_.chain.in.data;
    passed_.insert(current);
    while (!links_.empty()) {
      // All that read it; the one whose result is read in turn comes last.
      std::vector<ChainLink> readers;
      for (auto link = links_.begin(); link != links_.end();) {
        if (!Reads(*link, current)) {
          ++link;
          continue;
        }
        readers.push_back(std::move(*link));
        link = links_.erase(link);
      }
      if (readers.empty()) return std::nullopt;
      std::stable_partition(readers.begin(), readers.end(), [this](const ChainLink& reader) {
        return std::none_of(links_.begin(), links_.end(),
                            [&](const ChainLink& link) { return Reads(link, OutOf(reader).data); });
      });
      for (size_t n = 0; n < readers.size(); ++n) {
        if (!Add(readers[n], current, n + 1 < readers.size())) return std::nullopt;
      }
      current = OutOf(readers.back()).data;
      passed_.insert(current);
    }
    const size_t steps = joined_.before.size() + joined_.after.size();
    if (steps > static_cast<size_t>(kMostNumbersSteps)) return std::nullopt;
    PlaceNorm();
    return std::move(joined_);
  }

 private:
  // Rows and columns of all: those of a norm's vectors and of dropout, else one row.
  bool FindShape() {
    ChainDesc& chain = joined_.chain;
    const auto is = [&chain](int64_t rows, int64_t columns) {
      if (chain.rows == 0) chain.rows = rows, chain.columns = columns;
      return chain.rows == rows && chain.columns == columns;
    };
    for (const ChainLink& link : links_) {
      if (const NormDesc* norm = NormOf(link)) {
        if (!is(norm->vectors, norm->count)) return false;
      } else if (const auto& numbers = std::get<NumbersDesc>(link);
                 numbers.rule.op == kNumbersDrop && !is(numbers.rows, numbers.columns)) {
        return false;
      }
    }
    if (const auto* numbers = std::get_if<NumbersDesc>(&links_.front()); chain.rows == 0) {
      chain.rows = 1;
      chain.columns = numbers->columns;
    }
    if (chain.rows * chain.columns > kMostNumbers) return false;
    return std::all_of(links_.begin(), links_.end(), [&chain](const ChainLink& link) {
      const auto* of = std::get_if<NumbersDesc>(&link);
      if (of == nullptr) return true;
      const bool is_known = of->rule.op != kNumbersZero && of->rule.op != kNumbersCopy;
      const bool is_end_to_end =
          of->rows == 1 || (of->a_stride == of->columns && of->out_stride == of->columns);
      return is_known && is_end_to_end && of->rows * of->columns == chain.rows * chain.columns;
    });
  }

  bool Add(const ChainLink& link, const void* current, bool is_aside) {
    const DenseTensor& out = OutOf(link);
    if (passed_.count(out.data) != 0) return false;
    const bool stores = unread_.count(out.data) == 0;
    if (const NormDesc* norm = NormOf(link)) {
      if (joined_.norm.has_value() || is_aside) return false;
      // It reads its rows from memory.
      if (!joined_.before.empty() && unread_.count(current) != 0) return false;
      joined_.norm = *norm;
      leaves_out_ = !stores;
      return true;
    }
    const auto& numbers = std::get<NumbersDesc>(link);
    const bool chain_is_b = numbers.a.data != current;
    if (!chain_is_b && numbers.b.data == current) return false;
    std::vector<NumbersStep>& steps = joined_.norm.has_value() ? joined_.after : joined_.before;
    steps.push_back({.rule = numbers.rule,
                     .other = chain_is_b ? numbers.a : numbers.b,
                     .out = numbers.out,
                     .chain_is_b = chain_is_b,
                     .add = numbers.add,
                     .stores = stores,
                     .is_aside = is_aside});
    return true;
  }

  // A norm stores what it makes, for the chain behind it. Where nothing else reads that it takes
  // the place of the chain's last result, so that fewer bytes leave the cache.
  void PlaceNorm() {
    if (!joined_.norm.has_value()) return;
    NormDesc& norm = *joined_.norm;
    norm.in = joined_.chain.in;
    if (!leaves_out_ || joined_.after.empty() || norm.add != 0) return;
    const NumbersStep& last = joined_.after.back();
    if (last.stores != 0 && last.add == 0 && last.out.element == norm.out.element) {
      norm.out = last.out;
    }
  }

  std::vector<ChainLink> links_;
  const std::set<const void*> unread_;
  std::set<const void*> passed_;  // what the chain was so far
  bool leaves_out_ = false;       // nothing reads what the norm makes
  JoinedChain joined_;
};

}  // namespace

std::optional<JoinedChain> JoinLinks(std::vector<ChainLink> links,
                                     absl::Span<const void* const> unread) {
  return Joining(std::move(links), unread).Join();
}

bool JoinCurve(absl::Span<const ChainLink> links, absl::Span<const void* const> unread,
               ElementType operand, ProductDesc& product) {
  const auto* link = links.size() == 1 ? std::get_if<NumbersDesc>(&links.front()) : nullptr;
  if (link == nullptr) return false;
  const bool is_slope = link->rule.op == kNumbersSlope;
  if (!is_slope && link->rule.op != kNumbersCurve) return false;
  const DenseTensor& c = is_slope ? link->b : link->a;
  const bool is_unread = std::find(unread.begin(), unread.end(), c.data) != unread.end();
  const int32_t element = cuda::BiasCode(operand);
  for (const DenseTensor& t : {link->a, c, link->out}) {
    if (t.element != element || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  }
  if (c.data != product.c || product.c_element != element || product.result != kProductStore ||
      product.c_stride != product.columns || link->rows != 1 || link->add != 0 ||
      link->columns != int64_t{product.rows} * product.columns || (is_slope && !is_unread)) {
    return false;
  }
  product.curve = {.curve = link->rule.curve};
  if (is_slope) {
    product.curve.at = link->a.data;
    product.c = link->out.data;
  } else {
    product.curve.value = link->out.data;
    if (is_unread) product.c = nullptr;
  }
  return true;
}

}  // namespace attnd
