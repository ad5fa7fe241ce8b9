// ProductGroup: products in wide tiles that wait for each other and become one launch: at the end
// of each launch of its own many multiprocessors would be idle. Any order gives the same bits, but
// for products that add to one C: these take turns, tile by tile. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kernels/dense/dense_params.h"
#include "kernels/layers/cuda/launch_queue.h"
#include "kernels/layers/cuda/touched_bytes.h"

namespace attnd {

// Tiles of C.
int64_t TilesOf(const LayerKernel& kernel, const ProductDesc& p);
// The bytes of C, and of the values of its curve.
std::array<ByteRange, 2> WrittenBy(const ProductDesc& p);
// Those of A, B, the bias and what a curve's slope is taken at. What is added to is not among them.
std::array<ByteRange, 4> ReadBy(const PlainProductDesc& desc);

// Products of a launch that add to a C which others before them write take turns, by these words.
void GiveAddTurns(int32_t* words, absl::Span<WideProductDesc> products);

class ProductGroup {
 public:
  struct Waiting {
    PlainProductDesc desc;
    double flops = 0;
  };
  // With more of them launches of their own are as fast for products that add to one C.
  static constexpr int64_t kShortTilesInTurns = 2;

  explicit ProductGroup(int multiprocessors) : multiprocessors_(multiprocessors) {}

  // Whether it may join those that wait: it has their kernel and depth, does not read or write what
  // one of them writes or write what one reads, and all together are no more than a launch takes.
  // It may add to a C that others write, as a whole, while all have no more than
  // kShortTilesInTurns short tiles a multiprocessor.
  bool Takes(const LayerKernel& kernel, const Waiting& product) const;
  // After Takes.
  void Add(const LayerKernel& kernel, const Waiting& product);
  // Whether they go in short tiles: a multiprocessor has one of these at most, or one product adds
  // to a C that others write.
  bool AreShort() const { return takes_turns_ || short_tiles_ <= multiprocessors_; }
  // Whether a launch that reads and writes these ranges has to stay behind them.
  bool Meet(absl::Span<const ByteRange> reads, absl::Span<const ByteRange> writes) const {
    return touched_.Meet(reads, writes);
  }
  // Whether one of them reads or writes some of these bytes.
  bool Touches(const ByteRange& range) const { return touched_.AreTouched(range); }
  bool Writes(const ByteRange& range) const { return touched_.AreWritten(range); }

  bool empty() const { return products_.empty(); }
  const LayerKernel& kernel() const { return kernel_; }
  // Those that wait, in order; none do afterwards.
  std::vector<Waiting> Take();

 private:
  bool AddsToOneOfThem(const ProductDesc& p) const;

  const int multiprocessors_;
  LayerKernel kernel_ = KernelKind::kDenseProduct;
  std::vector<Waiting> products_;
  TouchedBytes touched_;
  double flops_ = 0;
  int64_t tiles_ = 0, short_tiles_ = 0;
  bool takes_turns_ = false;
};

}  // namespace attnd
