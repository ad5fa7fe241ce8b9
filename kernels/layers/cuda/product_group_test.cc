#include "kernels/layers/cuda/product_group.h"

#include <functional>
#include <string>

#include "gtest/gtest.h"
#include "kernels/layers/cuda/product_choice.h"

namespace attnd {
namespace {

LayerKernel WideOf(KernelKind kind, ElementType element = ElementType::kFloat16) {
  LayerKernel kernel(kind, element);
  kernel.wide = true;
  return kernel;
}
constexpr int kMultiprocessors = 2;
const LayerKernel kStores = WideOf(KernelKind::kProductRowsRows),
                  kGradient = WideOf(KernelKind::kProductDepthDepth);

void* At(uint64_t address) { return reinterpret_cast<void*>(address); }

// C [128, 64] = A [128, 256] . B [64, 256], in float16 but for float32 biases, 1 MiB apart from
// what other places have.
ProductGroup::Waiting ProductAt(uint64_t place) {
  const uint64_t at = place << 22;
  return {{.product = {.a = At(at),
                       .b = At(at + (1 << 20)),
                       .bias = At(at + (2 << 20)),
                       .c = At(at + (3 << 20)),
                       .a_stride = 256,
                       .b_stride = 256,
                       .c_stride = 64,
                       .rows = 128,
                       .columns = 64,
                       .depth = 256,
                       .result = kProductStore,
                       .bias_element = kBiasFloat32,
                       .c_element = kBiasFloat16},
           .a_element = kBiasFloat16,
           .b_element = kBiasFloat16,
           .operand = kBiasFloat16},
          1e6};
}
// C [64, 256] += A [128, 64] . B [128, 256].
ProductGroup::Waiting GradientAt(uint64_t place) {
  ProductGroup::Waiting gradient = ProductAt(place);
  PlainProductDesc& desc = gradient.desc;
  desc.product.bias = nullptr;
  desc.product.a_stride = 64;
  desc.product.c_stride = 256;
  desc.product.rows = 64;
  desc.product.columns = 256;
  desc.product.depth = 128;
  desc.product.result = kProductAddBlocks;
  desc.product.c_element = kBiasFloat32;
  desc.a_by_depth = desc.b_by_depth = 1;
  return gradient;
}

TEST(ProductGroup, TakesWhatDoesNotDependOnOthersAndFitsIntoTheirLaunch) {
  const ProductGroup::Waiting first = ProductAt(1);
  const auto& of_first = first.desc.product;
  struct Case {
    std::string name;
    bool takes;
    std::function<void(ProductGroup::Waiting&)> change;
    LayerKernel kernel = kStores;
  };
  using Waiting = ProductGroup::Waiting;
  const Case cases[] = {
      {"apart", true, [](Waiting&) {}},
      {"of the same operands", true,
       [&](Waiting& of) {
         of.desc.product.a = of_first.a;
         of.desc.product.b = of_first.b;
         of.desc.product.bias = of_first.bias;
       }},
      {"another layout", false, [](Waiting&) {}, WideOf(KernelKind::kProductRowsDepth)},
      {"another element", false, [](Waiting&) {},
       WideOf(KernelKind::kProductRowsRows, ElementType::kBFloat16)},
      {"another depth", false, [](Waiting& of) { of.desc.product.depth = 128; }},
      {"as much as a launch has", true,
       [](Waiting& of) { of.flops = GainOf(kStores) * kLaunchFlops - 1e6; }},
      {"more than a launch has", false,
       [](Waiting& of) { of.flops = GainOf(kStores) * kLaunchFlops; }},
      {"writes the same", false, [&](Waiting& of) { of.desc.product.c = of_first.c; }},
      {"adds to the same", true,
       [&](Waiting& of) {
         of.desc.product.c = of_first.c;
         of.desc.product.result = kProductAdd;
       }},
      {"adds to what it has not", true, [](Waiting& of) { of.desc.product.result = kProductAdd; }},
      {"adds to a part of the same", false,
       [&](Waiting& of) {
         of.desc.product.c = of_first.c;
         of.desc.product.rows = 64;
         of.desc.product.result = kProductAdd;
       }},
      {"adds in other rows of the same", false,
       [&](Waiting& of) {
         of.desc.product.c = static_cast<char*>(of_first.c) + 64 * 2;
         of.desc.product.result = kProductAdd;
       }},
      {"adds to what it reads", false,
       [&](Waiting& of) {
         of.desc.product.c = of_first.c;
         of.desc.product.a = of_first.c;
         of.desc.product.result = kProductAdd;
       }},
      {"adds to what the first reads", false,
       [&](Waiting& of) {
         of.desc.product.c = const_cast<void*>(of_first.a);
         of.desc.product.result = kProductAdd;
       }},
      {"reads the last number that is written", false,
       [&](Waiting& of) {
         of.desc.product.a = static_cast<const char*>(of_first.c) + 128 * 64 * 2 - 1;
       }},
      {"reads behind what is written", true,
       [&](Waiting& of) {
         of.desc.product.a = static_cast<const char*>(of_first.c) + 128 * 64 * 2;
       }},
      {"weights are written", false, [&](Waiting& of) { of.desc.product.b = of_first.c; }},
      {"biases are written", false, [&](Waiting& of) { of.desc.product.bias = of_first.c; }},
      {"writes inputs", false,
       [&](Waiting& of) { of.desc.product.c = const_cast<void*>(of_first.a); }},
      {"writes the last weight", false,
       [&](Waiting& of) {
         of.desc.product.c = static_cast<char*>(const_cast<void*>(of_first.b)) + 64 * 256 * 2 - 1;
       }},
      {"writes behind weights", true,
       [&](Waiting& of) {
         of.desc.product.c = static_cast<char*>(const_cast<void*>(of_first.b)) + 64 * 256 * 2;
       }},
      {"writes the last bias", false,
       [&](Waiting& of) {
         of.desc.product.c = static_cast<char*>(const_cast<void*>(of_first.bias)) + 255;
       }},
  };
  for (const Case& c : cases) {
    ProductGroup group(kMultiprocessors);
    ASSERT_TRUE(group.Takes(kStores, first));
    group.Add(kStores, first);
    ProductGroup::Waiting second = ProductAt(2);
    c.change(second);
    EXPECT_EQ(group.Takes(c.kernel, second), c.takes) << c.name;
  }
}

WideProductDesc WideAt(uint64_t place, int32_t items) {
  WideProductDesc desc = {.product = ProductAt(place).desc.product};
  desc.items = items;
  return desc;
}

TEST(ProductGroup, ThoseThatAddToOneTensorTakeTurns) {
  std::vector<WideProductDesc> products = {WideAt(1, 3), WideAt(2, 5), WideAt(1, 3),
                                           WideAt(2, 5), WideAt(1, 3), WideAt(3, 2)};
  for (size_t n = 2; n < products.size(); ++n) products[n].product.result = kProductAdd;
  int32_t words[8 * kWideProductWarps];
  GiveAddTurns(words, absl::MakeSpan(products));
  struct Turn {
    int32_t* words;
    int32_t own, next;
  };
  int32_t* const second = words + 3 * kWideProductWarps;
  const Turn expected[] = {{words, 0, 1},  {second, 0, 1}, {words, 1, 2},
                           {second, 1, 0}, {words, 2, 0},  {nullptr, 0, 0}};
  for (size_t n = 0; n < products.size(); ++n) {
    const AddTurn& turn = products[n].turn;
    EXPECT_EQ(turn.words, expected[n].words) << n;
    EXPECT_EQ(turn.own, expected[n].own) << n;
    EXPECT_EQ(turn.next, expected[n].next) << n;
  }
}

TEST(ProductGroup, ThoseThatAddToOneTensorHaveSoManyShortTilesAtMost) {
  const ProductGroup::Waiting first = ProductAt(1), other = ProductAt(2);  // two tiles each
  ProductGroup::Waiting adds = ProductAt(3);
  adds.desc.product.c = first.desc.product.c;
  adds.desc.product.result = kProductAdd;
  ProductGroup one(1);
  one.Add(kStores, first);
  EXPECT_FALSE(one.Takes(kStores, adds));
  EXPECT_TRUE(one.Takes(kStores, other));
  EXPECT_FALSE(one.AreShort());
  ProductGroup two(2);
  two.Add(kStores, first);
  EXPECT_TRUE(two.AreShort());
  ASSERT_TRUE(two.Takes(kStores, adds));
  two.Add(kStores, adds);
  EXPECT_TRUE(two.AreShort());
  EXPECT_FALSE(two.Takes(kStores, other));
  two.Take();
  two.Add(kStores, first);
  EXPECT_TRUE(two.Takes(kStores, other));
  two.Add(kStores, other);
  EXPECT_FALSE(two.AreShort());
  ProductGroup three(3);
  three.Add(kStores, first);
  three.Add(kStores, adds);
  EXPECT_TRUE(three.Takes(kStores, other));
}

TEST(ProductGroup, GradientsHaveTurnsForAllTiles) {
  ProductGroup group(kMultiprocessors);
  ProductGroup::Waiting large = GradientAt(1);
  large.desc.product.rows = 128;
  large.desc.product.columns = 128 * static_cast<int32_t>(kMostGradientTiles - 2);
  large.desc.product.c = At(uint64_t{1} << 40);
  large.desc.product.b = At(uint64_t{1} << 41);
  group.Add(kGradient, large);
  ProductGroup::Waiting next = GradientAt(2);  // two tiles
  EXPECT_TRUE(group.Takes(kGradient, next));
  group.Add(kGradient, next);
  EXPECT_FALSE(group.Takes(kGradient, GradientAt(3)));
  EXPECT_EQ(group.Take().size(), 2u);
  EXPECT_TRUE(group.empty());
  EXPECT_TRUE(group.Takes(kGradient, GradientAt(3)));
}

TEST(ProductGroup, HasSoManyProductsAtMost) {
  ProductGroup group(kMultiprocessors);
  for (size_t n = 0; n < kMostLaunchedTogether; ++n) {
    ASSERT_TRUE(group.Takes(kStores, ProductAt(n + 1))) << n;
    group.Add(kStores, ProductAt(n + 1));
  }
  EXPECT_FALSE(group.Takes(kStores, ProductAt(kMostLaunchedTogether + 1)));
}

TEST(ProductGroup, KnowsWhatItTouches) {
  ProductGroup group(kMultiprocessors);
  const ProductGroup::Waiting gradient = GradientAt(1);
  const auto& p = gradient.desc.product;
  EXPECT_FALSE(group.Touches(ByteRange::At(p.a, 1)));
  group.Add(kGradient, gradient);
  const auto behind = [](const void* data, int64_t bytes) {
    return static_cast<const char*>(data) + bytes;
  };
  const int64_t a_bytes = 128 * 64 * 2, b_bytes = 128 * 256 * 2, c_bytes = 64 * 256 * 4;
  for (const auto& [data, bytes] :
       {std::pair<const void*, int64_t>(p.a, a_bytes), {p.b, b_bytes}, {p.c, c_bytes}}) {
    EXPECT_TRUE(group.Touches(ByteRange::At(data, 1)));
    EXPECT_TRUE(group.Touches(ByteRange::At(behind(data, bytes - 1), 1)));
    EXPECT_TRUE(group.Touches(ByteRange::At(behind(data, -4), 5)));
    EXPECT_FALSE(group.Touches(ByteRange::At(behind(data, bytes), 64)));
    EXPECT_FALSE(group.Touches(ByteRange::At(behind(data, -4), 4)));
    EXPECT_FALSE(group.Touches(ByteRange::At(data, 0)));
    EXPECT_EQ(group.Writes(ByteRange::At(data, 1)), data == p.c);
  }
  group.Take();
  EXPECT_FALSE(group.Touches(ByteRange::At(p.a, 1)));
}

}  // namespace
}  // namespace attnd
