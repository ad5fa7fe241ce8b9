#include "kernels/layers/cuda/joined_chain.h"

#include <gtest/gtest.h>

#include <vector>

namespace attnd {
namespace {

// Tensors by number.
DenseTensor Tensor16(int64_t number) {
  return {reinterpret_cast<void*>(number << 8), kBiasFloat16};
}
NumbersDesc LinkOf(NumbersOp op, int64_t a, int64_t b, int64_t out) {
  return {.a = Tensor16(a),
          .b = b == 0 ? DenseTensor{} : Tensor16(b),
          .out = Tensor16(out),
          .rows = 1,
          .columns = 24,
          .rule = {.op = op}};
}
NumbersDesc DropOf(int64_t in, int64_t out) {
  NumbersDesc desc = LinkOf(kNumbersDrop, in, 0, out);
  desc.rows = 3;
  desc.columns = desc.a_stride = desc.out_stride = 8;
  return desc;
}
NormDesc NormLink(int64_t x, int64_t out) {
  return {.x = Tensor16(x), .out = Tensor16(out), .vectors = 3, .count = 8};
}
std::optional<JoinedChain> Joined(std::vector<ChainLink> links, std::vector<int64_t> unread = {}) {
  std::vector<const void*> data;
  for (int64_t number : unread) data.push_back(Tensor16(number).data);
  return JoinLinks(std::move(links), data);
}

TEST(JoinLinks, PassesResultsOnAndStoresThoseThatAreRead) {
  const auto joined =
      Joined({DropOf(1, 2), LinkOf(kNumbersSum, 3, 2, 4), NormLink(4, 5)}, /*unread=*/{2});
  ASSERT_TRUE(joined.has_value());
  ASSERT_TRUE(joined->norm.has_value());
  EXPECT_EQ(joined->norm->in.data, Tensor16(1).data);
  ASSERT_EQ(joined->before.size(), 2u);
  EXPECT_FALSE(joined->before[0].stores);
  EXPECT_TRUE(joined->before[1].stores);
  EXPECT_TRUE(joined->before[1].chain_is_b);
  EXPECT_EQ(joined->before[1].other.data, Tensor16(3).data);
}

// A gradient that ends comes first, the one that goes on last, whatever their order was.
TEST(JoinLinks, GivesAsideWhatTheNextDoesNotRead) {
  const auto joined = Joined({LinkOf(kNumbersProduct, 1, 2, 3), LinkOf(kNumbersProduct, 1, 4, 5),
                              LinkOf(kNumbersSlope, 6, 3, 7)});
  ASSERT_TRUE(joined.has_value());
  ASSERT_EQ(joined->before.size(), 3u);
  EXPECT_EQ(joined->before[0].out.data, Tensor16(5).data);
  EXPECT_TRUE(joined->before[0].is_aside);
  EXPECT_EQ(joined->before[1].out.data, Tensor16(3).data);
  EXPECT_FALSE(joined->before[1].is_aside);
  EXPECT_TRUE(joined->before[2].chain_is_b);
  EXPECT_EQ(joined->chain.rows, 1);
  EXPECT_EQ(joined->chain.columns, 24);
}

TEST(JoinLinks, PutsAnUnreadNormWhereTheLastResultGoes) {
  const std::vector<ChainLink> links = {NormLink(1, 2), DropOf(2, 3)};
  EXPECT_EQ(Joined(links)->norm->out.data, Tensor16(2).data);
  EXPECT_EQ(Joined(links, {2})->norm->out.data, Tensor16(3).data);
  // Not where either adds to what is there, nor in another element.
  NumbersDesc adds = DropOf(2, 3), wide = adds;
  adds.add = 1;
  wide.out.element = kBiasFloat32;
  NormDesc adding = NormLink(1, 2);
  adding.add = 1;
  EXPECT_EQ(Joined({NormLink(1, 2), adds}, {2})->norm->out.data, Tensor16(2).data);
  EXPECT_EQ(Joined({NormLink(1, 2), wide}, {2})->norm->out.data, Tensor16(2).data);
  EXPECT_EQ(Joined({adding, DropOf(2, 3)}, {2})->norm->out.data, Tensor16(2).data);
}

TEST(JoinLinks, LeavesApartWhatIsNoChain) {
  EXPECT_FALSE(Joined({DropOf(1, 2), DropOf(3, 4)}).has_value());
  // Over what was read, or twice on itself.
  EXPECT_FALSE(Joined({DropOf(1, 2), LinkOf(kNumbersCurve, 2, 0, 1)}).has_value());
  EXPECT_FALSE(Joined({DropOf(1, 2), LinkOf(kNumbersProduct, 2, 2, 3)}).has_value());
  // A norm's rows that are not written; two norms; a norm aside.
  EXPECT_FALSE(Joined({DropOf(1, 2), NormLink(2, 3)}, {2}).has_value());
  EXPECT_FALSE(Joined({NormLink(1, 2), NormLink(2, 3)}).has_value());
  EXPECT_FALSE(Joined({NormLink(1, 2), DropOf(1, 3), DropOf(3, 4)}).has_value());
  // Other shapes, strides and operations.
  NumbersDesc wide = DropOf(2, 3);
  wide.rows = 1, wide.columns = 24;
  EXPECT_FALSE(Joined({DropOf(1, 2), wide}).has_value());
  NumbersDesc apart = DropOf(2, 3);
  apart.out_stride = 9;
  EXPECT_FALSE(Joined({DropOf(1, 2), apart}).has_value());
  EXPECT_FALSE(Joined({DropOf(1, 2), LinkOf(kNumbersCopy, 2, 0, 3)}).has_value());
  std::vector<ChainLink> nine;
  for (int64_t n = 1; n <= 9; ++n) nine.emplace_back(LinkOf(kNumbersCurve, n, 0, n + 1));
  EXPECT_FALSE(Joined(nine).has_value());
  nine.pop_back();
  EXPECT_TRUE(Joined(nine).has_value());
}

}  // namespace
}  // namespace attnd
