// Matrix products of CudaDevice, and sums of columns: what waits for others of a launch.
#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/container/inlined_vector.h"
#include "base/check.h"
#include "kernels/cuda/layout/descriptors.h"
#include "kernels/dense/listed_params.h"
#include "kernels/layers/cuda/cuda_device.h"
#include "kernels/layers/cuda/dense_tensors.h"
#include "kernels/layers/cuda/product_choice.h"

namespace attnd {

void CudaDevice::Pack(const WeightMatrix& matrix) {
  if (PackedBytes(matrix) == 0) return;
  AddNumbers(NumbersOf(kNumbersCopy, matrix.weight, {matrix.packed, matrix.operand},
                       matrix.rows * matrix.columns));
}

void CudaDevice::AddProduct(PlainProductDesc desc, ElementType operand) {
  ProductDesc& p = desc.product;
  const LayerKernel kernel = KernelOf(desc, operand);
  const bool waits = kernel.wide || queue_.HasListedGradients(kernel);
  if (!waits) {
    for (const ByteRange& written : WrittenBy(p)) BeforeWriting(written);
  }
  const bool is_plain = kernel.kind == KernelKind::kDenseProduct;
  const ProductTileSize tile = TileSizeOf(kernel);
  const double row_flops = 2.0 * p.columns * std::max(p.depth, 1);
  const int64_t most = RowsOfLaunch(kernel, p, LaunchQueue::kTurns);
  const auto* a = static_cast<const std::byte*>(p.a);
  auto* c = static_cast<std::byte*>(p.c);
  const ProductCurve curve = p.curve;
  float* const column_sums = ColumnSumsOf(p);
  const int64_t rows = p.rows;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t a_first = desc.a_by_depth != 0 ? first : first * p.a_stride;
    p.a = a + a_first * CodeBytes(desc.a_element);
    const int64_t c_first = first * p.c_stride * CodeBytes(p.c_element);
    p.c = c == nullptr ? nullptr : c + c_first;
    if (column_sums != nullptr) p.bias = column_sums + first;
    if (p.curve.at != nullptr) p.curve.at = static_cast<const std::byte*>(curve.at) + c_first;
    if (p.curve.value != nullptr) p.curve.value = static_cast<std::byte*>(curve.value) + c_first;
    p.rows = static_cast<int32_t>(std::min(most, rows - first));
    const double flops = row_flops * p.rows;
    if (waits) {
      AddWaiting(kernel, {desc, flops});
      continue;
    }
    p.turns = queue_.turns();
    const int64_t tiles = ProductTiles(p, tile.rows, tile.columns);
    if (is_plain) {
      queue_.Add(kernel, desc, tiles, flops);
    } else {
      queue_.Add(kernel, p, tiles * ProductTurns(p), flops / GainOf(kernel));
    }
  }
}

// Gradients of weights, and sums of columns, wait until something would write what they read; other
// products in wide tiles wait for those that follow at once.
void CudaDevice::AddWaiting(const LayerKernel& kernel, const ProductGroup::Waiting& product) {
  const ProductDesc& p = product.desc.product;
  const bool is_gradient = p.result == kProductAddBlocks;
  ProductGroup& group = is_gradient ? gradients_ : siblings_;
  if (is_gradient) {
    if (siblings_.Meet(ReadBy(product.desc), WrittenBy(p))) LaunchGroup(siblings_);
    for (const ByteRange& written : WrittenBy(p)) {
      if (sums_.Writes(written)) LaunchSums();
    }
  } else {
    for (const ByteRange& written : WrittenBy(p)) LaunchTouching(written);
  }
  if (!group.Takes(kernel, product) || tuning_.Of(kernel.kind, p).apart) LaunchGroup(group);
  group.Add(kernel, product);
}

void CudaDevice::LaunchGroup(ProductGroup& group) {
  if (group.empty()) return;
  LayerKernel kernel = group.kernel();
  const bool are_short = group.AreShort();
  const std::vector<ProductGroup::Waiting> waiting = group.Take();
  if (!kernel.wide) return LaunchListed(kernel, waiting);
  if (product_log_ != nullptr) {
    ProductLog::Group& logged = product_log_->groups.emplace_back();
    for (const ProductGroup::Waiting& of : waiting) {
      logged.keys.push_back(KeyOf(kernel.kind, of.desc.product));
    }
  }
  if (kernel.kind == KernelKind::kProductDepthDepth) {
    LaunchGradients(kernel, waiting);
  } else {
    kernel.small = are_short;
    LaunchWide(kernel, waiting);
  }
}

void CudaDevice::LaunchGradients(const LayerKernel& kernel,
                                 absl::Span<const ProductGroup::Waiting> waiting) {
  std::vector<ProductDesc> plain;
  for (const ProductGroup::Waiting& of : waiting) plain.push_back(of.desc.product);
  const GradientItems of = ItemsOf(plain, engine_.device().multiprocessors(),
                                   tuning_.Of(kernel.kind, plain[0]).gradient_columns);
  if (product_log_ != nullptr) {
    product_log_->groups.back().gradient_columns = of.products[0].cut.tile_columns;
  }
  std::vector<WideProductDesc> products;
  double flops = 0;
  int64_t items = 0;
  int32_t* turns = queue_.turns() + 1;
  for (size_t n = 0; n < waiting.size(); ++n) {
    const GradientCut& cut = of.products[n].cut;
    WideProductDesc& product = products.emplace_back(WideDescOf(waiting[n].desc, kWideProductRows));
    product.cut = cut;
    product.items = static_cast<int32_t>(of.products[n].count);
    product.claims = queue_.turns();
    product.product.turns = turns;
    turns += ProductTiles(plain[n], kWideProductRows, cut.tile_columns) * kWideGradientTurns;
    items += product.items;
    flops += waiting[n].flops;
  }
  queue_.AddList(kernel, absl::MakeConstSpan(products), items, flops / GainOf(kernel));
}

void CudaDevice::LaunchWide(const LayerKernel& kernel,
                            absl::Span<const ProductGroup::Waiting> waiting) {
  std::vector<WideProductDesc> products;
  double flops = 0;
  int64_t tiles = 0;
  for (const ProductGroup::Waiting& of : waiting) {
    products.push_back(WideDescOf(of.desc, TileSizeOf(kernel).rows));
    products.back().items = static_cast<int32_t>(TilesOf(kernel, of.desc.product));
    tiles += products.back().items;
    flops += of.flops;
  }
  GiveAddTurns(queue_.turns(), absl::MakeSpan(products));
  queue_.AddList(kernel, absl::MakeConstSpan(products), tiles, flops / GainOf(kernel));
}

void CudaDevice::LaunchListed(const LayerKernel& kernel,
                              absl::Span<const ProductGroup::Waiting> products) {
  std::vector<ProductDesc> descs;
  ListedGradients list;
  std::fill(std::begin(list.ends), std::end(list.ends), ListedGradients::kNoBlock);
  static_assert(kMostLaunchedTogether <= std::size_t{ListedGradients::kMost});
  double flops = 0;
  int64_t blocks = 0;
  int32_t* turns = queue_.turns();
  const ProductTileSize tile = TileSizeOf(kernel);
  for (const ProductGroup::Waiting& waiting : products) {
    ProductDesc& p = descs.emplace_back(waiting.desc.product);
    const int64_t tiles = ProductTiles(p, tile.rows, tile.columns);
    p.turns = turns;
    turns += tiles;
    blocks += tiles * ProductTurns(p);
    list.ends[descs.size() - 1] = static_cast<int32_t>(blocks);
    flops += waiting.flops;
  }
  std::vector<std::byte> listed(sizeof(list) + descs.size() * sizeof(ProductDesc));
  std::memcpy(listed.data(), &list, sizeof(list));
  std::memcpy(listed.data() + sizeof(list), descs.data(), descs.size() * sizeof(ProductDesc));
  queue_.AddList(kernel, absl::MakeConstSpan(listed), blocks, flops / GainOf(kernel));
}

void CudaDevice::LaunchSums() {
  if (sums_.empty()) return;
  const double flops = sums_.flops();
  const std::vector<ColumnSumsDesc> sums =
      sums_.Take(queue_.turns(), reinterpret_cast<float*>(queue_.staging()));
  int64_t blocks = 0;
  for (const ColumnSumsDesc& of : sums) blocks += of.blocks;
  queue_.AddList(KernelKind::kDenseColumnSums, absl::MakeConstSpan(sums), blocks, flops);
}

void CudaDevice::LaunchAll() {
  LaunchGroup(siblings_);
  LaunchSums();
  LaunchGroup(gradients_);
}

void CudaDevice::LaunchTouching(const ByteRange& written) {
  if (sums_.Touches(written)) LaunchSums();
  if (gradients_.Touches(written)) LaunchGroup(gradients_);
}

void CudaDevice::BeforeWriting(const ByteRange& written) {
  LaunchGroup(siblings_);
  LaunchTouching(written);
}

void CudaDevice::BeforeReading(const DenseTensor& t, int64_t numbers) {
  LaunchGroup(siblings_);
  const ByteRange read = ByteRange::At(t.data, numbers * CodeBytes(t.element));
  if (sums_.Writes(read)) LaunchSums();
  if (gradients_.Writes(read)) LaunchGroup(gradients_);
}

LayerKernel CudaDevice::KernelOf(const PlainProductDesc& desc, ElementType operand) {
  std::optional<LayerKernel> large = TensorCoreKernel(desc, operand);
  if (!large.has_value()) return KernelKind::kDenseProduct;
  LayerKernel small = *large, wide = *large;
  small.small = true;
  wide.wide = true;
  absl::InlinedVector<LayerKernel, 3> there;
  for (const LayerKernel& kernel : {*large, small, wide}) {
    if (queue_.Has(kernel)) there.push_back(kernel);
  }
  if (there.empty()) return KernelKind::kDenseProduct;
  const ProductDesc& p = desc.product;
  const LayerKernel fastest = FastestOf(there, p, engine_.device().multiprocessors());
  if (fastest.wide || there.size() < 2) return fastest;
  if (product_log_ != nullptr) product_log_->sized[KeyOf(large->kind, p)] = fastest.small;
  const std::optional<bool> is_small = tuning_.Of(large->kind, p).small;
  return !is_small.has_value() ? fastest : *is_small ? small : *large;
}

// The map of 16-bit operands: `size` rows (columns) of C in tiles of `tile`.
TensorMap CudaDevice::MapOfOperand(const void* data, int64_t stride, bool by_depth, int32_t size,
                                   int32_t depth, int32_t tile) {
  RowsBox box = {.address = reinterpret_cast<uint64_t>(data),
                 .columns = by_depth ? size : depth,
                 .rows = by_depth ? depth : size,
                 .heads = 1,
                 .entries = 1,
                 .row_bytes = 2 * stride,
                 .box_rows = by_depth ? kWideProductStep : tile};
  box.head_bytes = box.entry_bytes = box.rows * box.row_bytes;
  return queue_.MapOf(box);
}
WideProductDesc CudaDevice::WideDescOf(const PlainProductDesc& desc, int32_t tile_rows) {
  const ProductDesc& p = desc.product;
  return {
      p,
      MapOfOperand(p.a, p.a_stride, desc.a_by_depth != 0, p.rows, p.depth, tile_rows),
      MapOfOperand(p.b, p.b_stride, desc.b_by_depth != 0, p.columns, p.depth, kWideProductColumns),
      {},
      {},
      0,
      nullptr};
}

void CudaDevice::Multiply(const WeightProduct& product) {
  const WeightMatrix& weight = product.weight;
  const bool is_packed = PackedBytes(weight) > 0;
  CHECK(product.rows <= std::numeric_limits<int32_t>::max());
  PlainProductDesc desc = {
      .product = {.a = product.a.data,
                  .b = is_packed ? weight.packed : weight.weight.data,
                  .bias = product.bias.data,
                  .c = product.c.data,
                  .a_stride = product.depth(),
                  .b_stride = weight.columns,
                  .c_stride = product.columns(),
                  .rows = static_cast<int32_t>(product.rows),
                  .columns = static_cast<int32_t>(product.columns()),
                  .depth = static_cast<int32_t>(product.depth()),
                  .result = product.add ? kProductAdd : kProductStore,
                  .bias_element = cuda::BiasCode(product.bias.element),
                  .c_element = cuda::BiasCode(product.c.element)},
      .a_element = cuda::BiasCode(product.a.element),
      .b_element = cuda::BiasCode(is_packed ? weight.operand : weight.weight.element),
      .operand = cuda::BiasCode(weight.operand),
      .b_by_depth = !product.is_transposed};
  if (segment_.has_value()) {
    segment_->product.emplace(desc, weight.operand);
    return;
  }
  AddProduct(desc, weight.operand);
}

void CudaDevice::AddGradient(const GradientProduct& product) {
  CHECK(product.rows <= std::numeric_limits<int32_t>::max());
  PlainProductDesc desc = {.product = {.a = product.a.data,
                                       .b = product.b.data,
                                       .c = product.sums,
                                       .a_stride = product.a_columns,
                                       .b_stride = product.b_columns,
                                       .c_stride = product.b_columns,
                                       .rows = static_cast<int32_t>(product.a_columns),
                                       .columns = static_cast<int32_t>(product.b_columns),
                                       .depth = static_cast<int32_t>(product.rows),
                                       .result = kProductAddBlocks,
                                       .c_element = kBiasFloat32},
                           .a_element = cuda::BiasCode(product.a.element),
                           .b_element = cuda::BiasCode(product.b.element),
                           .operand = cuda::BiasCode(product.operand),
                           .a_by_depth = 1,
                           .b_by_depth = 1};
  desc.product.bias = product.column_sums;
  const bool sums_columns = queue_.HasListedGradients(KernelOf(desc, product.operand));
  if (!sums_columns) desc.product.bias = nullptr;
  AddProduct(desc, product.operand);
  if (sums_columns || product.column_sums == nullptr) return;
  AddColumnSums({product.a, product.operand, product.rows, product.a_columns, product.column_sums});
}

void CudaDevice::AddColumnSums(const ColumnSum& sum) {
  AddSums({.in = TensorOf(sum.in),
           .operand = cuda::BiasCode(sum.operand),
           .columns = static_cast<int32_t>(sum.columns),
           .rows = sum.rows,
           .block_rows = kGradientBlockRows,
           .sums = sum.sums},
          4.0 * sum.rows * sum.columns);
}

void CudaDevice::AddSums(ColumnSumsDesc desc, double flops) {
  if (segment_.has_value()) {
    segment_->sums.emplace_back(desc, flops);
    return;
  }
  if (siblings_.Meet(ReadBy(desc), WrittenBy(desc))) LaunchGroup(siblings_);
  for (const ByteRange& written : WrittenBy(desc)) {
    if (gradients_.Writes(written)) LaunchGroup(gradients_);
  }
  static_assert(kGradientBlockRows % kSumStretch == 0);
  static_assert(2 * kMaxParameterDimension / kSumColumns <= LaunchQueue::kTurns);
  CHECK(SumPartsOfBlock(desc) == 1 || SumsOfBlock(desc) * 4 <= LaunchQueue::kStagingBytes);
  // As many blocks of rows as have room for their sums and turns.
  const int64_t rows = desc.rows;
  const int64_t blocks =
      std::max<int64_t>(std::min<int64_t>(LaunchQueue::kStagingBytes / 4 / SumsOfBlock(desc),
                                          LaunchQueue::kTurns / SumGroups(desc) - 1),
                        1);
  const int64_t most = blocks * desc.block_rows;
  for (int64_t first = 0; first < rows; first += most) {
    desc.rows = std::min(most, rows - first);
    if (!sums_.Takes(desc)) LaunchSums();
    sums_.Add(desc, flops * static_cast<double>(desc.rows) / static_cast<double>(rows));
    desc.in = Behind(desc.in, desc.rows * desc.columns);
    desc.x = Behind(desc.x, desc.rows * desc.columns);
    if (desc.statistics != nullptr) desc.statistics += desc.rows;
  }
}

}  // namespace attnd
