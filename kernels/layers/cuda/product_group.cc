#include "kernels/layers/cuda/product_group.h"

#include <array>

#include "base/check.h"
#include "kernels/dense/listed_params.h"
#include "kernels/layers/cuda/dense_tensors.h"
#include "kernels/layers/cuda/product_choice.h"

namespace attnd {
namespace {

ByteRange RangeOf(const void* data, int64_t rows, int64_t stride, int64_t columns,
                  int32_t element) {
  if (data == nullptr || rows == 0 || columns == 0) return {};
  return ByteRange::At(data, ((rows - 1) * stride + columns) * CodeBytes(element));
}
ByteRange OperandOf(const void* data, int64_t stride, bool by_depth, int64_t size, int64_t depth,
                    int32_t element) {
  return by_depth ? RangeOf(data, depth, stride, size, element)
                  : RangeOf(data, size, stride, depth, element);
}
int64_t ShortTilesOf(const ProductDesc& p) {
  return ProductTiles(p, kShortProductRows, kWideProductColumns);
}

bool HaveOneC(const ProductDesc& p, const ProductDesc& q) {
  return p.c == q.c && p.c_stride == q.c_stride && p.rows == q.rows && p.columns == q.columns &&
         p.c_element == q.c_element;
}

}  // namespace

int64_t TilesOf(const LayerKernel& kernel, const ProductDesc& p) {
  const ProductTileSize size = TileSizeOf(kernel);
  return ProductTiles(p, size.rows, size.columns);
}

std::array<ByteRange, 4> ReadBy(const PlainProductDesc& desc) {
  const ProductDesc& p = desc.product;
  return {OperandOf(p.a, p.a_stride, desc.a_by_depth != 0, p.rows, p.depth, desc.a_element),
          OperandOf(p.b, p.b_stride, desc.b_by_depth != 0, p.columns, p.depth, desc.b_element),
          RangeOf(p.bias, 1, 0, p.columns, p.bias_element),
          RangeOf(p.curve.at, p.rows, p.c_stride, p.columns, p.c_element)};
}

std::array<ByteRange, 2> WrittenBy(const ProductDesc& p) {
  const ByteRange c = RangeOf(p.c, p.rows, p.c_stride, p.columns, p.c_element);
  if (p.result == kProductAddBlocks) {
    return {c, RangeOf(ColumnSumsOf(p), 1, 0, p.rows, kBiasFloat32)};
  }
  return {c, RangeOf(p.curve.value, p.rows, p.c_stride, p.columns, p.c_element)};
}

bool ProductGroup::Takes(const LayerKernel& kernel, const Waiting& product) const {
  if (products_.empty()) return true;
  if (products_.size() == kMostLaunchedTogether) return false;
  const ProductDesc& p = product.desc.product;
  const ProductDesc& first = products_.front().desc.product;
  if (kernel.kind != kernel_.kind || kernel.element != kernel_.element || p.depth != first.depth) {
    return false;
  }
  if (flops_ + product.flops > GainOf(kernel) * kLaunchFlops) return false;
  if (p.result == kProductAddBlocks && tiles_ + TilesOf(kernel, p) > kMostGradientTiles) {
    return false;
  }
  const bool takes_turn = AddsToOneOfThem(p);
  const int64_t most_short = kShortTilesInTurns * multiprocessors_;
  if ((takes_turn || takes_turns_) && short_tiles_ + ShortTilesOf(p) > most_short) return false;
  if (!takes_turn) return !touched_.Meet(ReadBy(product.desc), WrittenBy(p));
  return !touched_.Meet(ReadBy(product.desc), {}) && !touched_.AreRead(WrittenBy(p)[0]);
}

// And writes nothing else that one of them writes.
bool ProductGroup::AddsToOneOfThem(const ProductDesc& p) const {
  if (p.result != kProductAdd) return false;
  const ByteRange own = WrittenBy(p)[0];
  bool adds = false;
  for (const Waiting& waiting : products_) {
    const auto& [c, value] = WrittenBy(waiting.desc.product);
    const bool have_one_c = HaveOneC(waiting.desc.product, p);
    if ((!have_one_c && c.Meets(own)) || value.Meets(own)) return false;
    adds |= have_one_c;
  }
  return adds;
}

void ProductGroup::Add(const LayerKernel& kernel, const Waiting& product) {
  DCHECK(Takes(kernel, product));
  kernel_ = kernel;
  takes_turns_ |= AddsToOneOfThem(product.desc.product);
  products_.push_back(product);
  touched_.Add(ReadBy(product.desc), WrittenBy(product.desc.product));
  flops_ += product.flops;
  tiles_ += TilesOf(kernel, product.desc.product);
  short_tiles_ += ShortTilesOf(product.desc.product);
}

std::vector<ProductGroup::Waiting> ProductGroup::Take() {
  touched_.Clear();
  flops_ = 0;
  tiles_ = short_tiles_ = 0;
  takes_turns_ = false;
  return std::exchange(products_, {});
}

void GiveAddTurns(int32_t* words, absl::Span<WideProductDesc> products) {
  for (size_t n = 0; n < products.size(); ++n) {
    WideProductDesc& of = products[n];
    WideProductDesc* before = nullptr;  // the last one that writes this C
    for (size_t m = 0; m < n && of.product.result == kProductAdd; ++m) {
      if (HaveOneC(products[m].product, of.product)) before = &products[m];
    }
    if (before == nullptr) continue;
    AddTurn& turn = before->turn;
    if (turn.words == nullptr) {
      turn.words = words;
      words += int64_t{of.items} * kWideProductWarps;
    }
    turn.next = turn.own + 1;
    of.turn = {turn.words, turn.next, 0};
  }
}

}  // namespace attnd
