#include "kernels/layers/cuda/plan_search.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "gtest/gtest.h"
#include "kernels/dense/dense_params.h"
#include "modules/known_layers.h"

namespace attnd {
namespace {

constexpr double kMicrosecond = 1e-6;
const ProductKey kSizedProduct = {KernelKind::kProductRowsRows, 768, 768};
const ProductKey kWeightGradient = {KernelKind::kProductDepthDepth, 3072, 768};

// Says what each part takes: microseconds of an op, and of a segment of several.
class FakeBench final : public SegmentBench {
 public:
  explicit FakeBench(bool trains = true) : trains_(trains) {}

  absl::StatusOr<double> Seconds(const SegmentPart& part, const ProductTuning& tuning,
                                 int times) override {
    runs_ += times;
    clock_ += 0.01;
    double sum = 0;
    for (const OpSegment& segment : part.segments) sum += CostOf(part.direction, segment);
    for (const auto& [key, choice] : tuning.products) {
      if (choice.small == true) sum *= small_;
      if (choice.gradient_columns == kWideGradientColumns) sum *= wide_;
      if (choice.gradient_columns == kNarrowGradientColumns) sum *= narrow_;
      if (choice.apart) sum *= apart_;
    }
    if (lies_ != nullptr) return lies_();
    return sum * kMicrosecond * times;
  }
  absl::StatusOr<ProductLog> ProductsOf(const SegmentPart& part) override {
    ProductLog log;
    if (part.direction == Direction::kForward) {
      log.sized = {{kSizedProduct, false}};
      // q, k and v.
      const size_t together = part.segments.size() > 1 ? 3 : 1;
      log.groups = {{std::vector<ProductKey>(together, kSizedProduct), 0}};
    } else {
      log.groups = {{{kWeightGradient, kWeightGradient}, predicted_columns_}};
    }
    return log;
  }
  bool trains() const override { return trains_; }
  absl::Status Finish() override {
    if (finished_ != nullptr) ++*finished_;
    return absl::OkStatus();
  }

  // By how many ops a segment has; otherwise 10 an op.
  std::map<std::pair<Direction, int64_t>, double> joined_;
  double small_ = 1, wide_ = 1, narrow_ = 1, apart_ = 1;  // times as long
  std::function<double()> lies_;
  int32_t predicted_columns_ = kNarrowGradientColumns;
  int runs_ = 0;
  double clock_ = 0;
  int* finished_ = nullptr;  // counts them

 private:
  double CostOf(Direction direction, const OpSegment& segment) const {
    const auto found = joined_.find({direction, segment.end - segment.first});
    return found != joined_.end() ? found->second
                                  : 10.0 * static_cast<double>(segment.end - segment.first);
  }
  const bool trains_;
};

ModuleGraph Bert(ElementType element = ElementType::kFloat16) {
  return *ModuleGraph::Make(BertLayers({.width = 768,
                                        .heads = 12,
                                        .kv_heads = 12,
                                        .inner = 3072,
                                        .dropout = 26,
                                        .element = element}));
}
constexpr RowCounts kBertRows = {512, 0};
const GpuRates& kSearchedGpu = *GpuNamed("h100");

struct Found {
  BlockChoice choice;
  int samples;
};
Found Search(FakeBench& bench, PartSampler::Budget budget = {90, 1e9}) {
  const ModuleGraph graph = Bert();
  PartSampler sampler(bench, budget, [&] { return bench.clock_; });
  absl::StatusOr<BlockChoice> choice = SearchBlock(sampler, graph, 0, kBertRows, kSearchedGpu);
  EXPECT_TRUE(choice.ok()) << choice.status();
  EXPECT_TRUE(SchemeOf(graph, 0, choice->ends).ok());
  return {*choice, sampler.samples()};
}

TEST(SearchBlock, TakesWhatIsMeasuredToBeFaster) {
  const BlockEnds bound = BoundScheme(Bert(), 0, kBertRows, kSearchedGpu);
  {
    FakeBench bench;  // all take the same: what was there stays
    const Found found = Search(bench);
    EXPECT_EQ(found.choice.ends.forward, bound.forward);
    EXPECT_EQ(found.choice.ends.backward, bound.backward);
    EXPECT_TRUE(found.choice.products.empty());
    EXPECT_LE(found.samples, 90);
  }
  FakeBench bench;
  bench.joined_ = {{{Direction::kForward, 3}, 50}, {{Direction::kForward, 2}, 15}};
  const Found found = Search(bench);
  // Two ops and one, in either order.
  EXPECT_EQ(found.choice.ends.forward.size(), bound.forward.size() + 2);
  EXPECT_EQ(found.choice.ends.backward, bound.backward);
}

TEST(SearchBlock, StaysUnlessAnotherTakesTwoPercentLess) {
  const BlockEnds bound = BoundScheme(Bert(), 0, kBertRows, kSearchedGpu);
  for (const auto& [of_three, moves] : {std::pair{30.4, false}, std::pair{31.0, true}}) {
    FakeBench bench;
    bench.joined_ = {{{Direction::kBackward, 3}, of_three}};
    EXPECT_EQ(Search(bench).choice.ends.backward == bound.backward, !moves) << of_three;
  }
  for (const auto& [small, moves] : {std::pair{0.985, false}, std::pair{0.975, true}}) {
    FakeBench bench;
    bench.small_ = small;
    const ProductChoices products = Search(bench).choice.products;
    EXPECT_EQ(products.count(kSizedProduct), moves ? 1 : 0) << small;
  }
}

TEST(SearchBlock, TakesWhatProductsGainBy) {
  FakeBench bench;
  bench.small_ = 0.9;
  bench.wide_ = 0.8;
  bench.narrow_ = 0.95;
  bench.apart_ = 1.1;
  const ProductChoices products = Search(bench).choice.products;
  EXPECT_EQ(products.at(kSizedProduct), (ProductChoice{.small = true}));
  EXPECT_EQ(products.at(kWeightGradient),
            (ProductChoice{.gradient_columns = kWideGradientColumns}));
  bench.predicted_columns_ = kWideGradientColumns;
  bench.narrow_ = 0.7;
  EXPECT_EQ(Search(bench).choice.products.at(kWeightGradient),
            (ProductChoice{.gradient_columns = kNarrowGradientColumns}));
  FakeBench apart;
  apart.apart_ = 0.9;
  EXPECT_EQ(Search(apart).choice.products.at(kSizedProduct), (ProductChoice{.apart = true}));
}

TEST(SearchBlock, MeasuresForwardAloneWhereThereIsNoBackward) {
  FakeBench bench(/*trains=*/false);
  bench.wide_ = 0.5;
  EXPECT_TRUE(Search(bench).choice.products.empty());
}

TEST(SearchBlock, KeepsToItsBudget) {
  for (int samples = 0; samples < 60; samples += 3) {
    FakeBench bench;
    bench.joined_ = {{{Direction::kForward, 3}, 50}};
    bench.small_ = 0.9;
    EXPECT_LE(Search(bench, {samples, 1e9}).samples, samples);
  }
  FakeBench late;
  late.small_ = 0.5;
  // A run takes 10 ms of its clock, a sample six.
  EXPECT_LE(Search(late, {90, 0.31}).samples, 6);
  EXPECT_LT(late.clock_, 0.33);
}

TEST(SearchBlock, RunsPartsOfSomeMilliseconds) {
  FakeBench bench;
  const OpSegment one{.first = 0, .end = 1};
  const SegmentPart short_part{.segments = {one}};
  PartSampler sampler(bench, {}, [] { return 0.0; });
  const ProductTuning none;
  const PartSampler::Candidate candidate = {short_part, none};
  EXPECT_NEAR(sampler.Measure({&candidate, 1})->front(), 10, 1e-9);
  EXPECT_EQ(bench.runs_, 1 + 5 * 16);
  bench.runs_ = 0;
  bench.joined_ = {{{Direction::kForward, 1}, 150}};
  EXPECT_NEAR(sampler.Measure({&candidate, 1})->front(), 150, 1e-9);
  EXPECT_EQ(bench.runs_, 1 + 5 * 2);
  EXPECT_EQ(sampler.samples(), 2);
}

TEST(SearchBlock, EndsWithALegalPlanWhateverTimesSay) {
  constexpr double kLies[] = {0,
                              1e9,
                              -1,
                              std::numeric_limits<double>::quiet_NaN(),
                              std::numeric_limits<double>::infinity(),
                              1e-6};
  for (uint64_t seed = 0; seed < 50; ++seed) {
    FakeBench bench;
    Random random(seed);
    bench.lies_ = [&] { return kLies[random.Between(0, 5)]; };
    EXPECT_LE(Search(bench).samples, 90);  // which looks at its plan too
  }
  for (double lie : kLies) {
    FakeBench bench;
    bench.lies_ = [lie] { return lie; };
    const Found found = Search(bench);
    EXPECT_TRUE(found.choice.products.empty()) << lie;
  }
}

TEST(ProductTuning, IsOfCallsOfItsRowsAlone) {
  const ProductTuning tuning = {
      512, {{kSizedProduct, {.small = true}}, {kWeightGradient, {.gradient_columns = 128}}}};
  const auto of = [&](int32_t rows, int32_t depth) {
    return tuning.Of(KernelKind::kProductRowsRows, {.rows = rows, .columns = 768, .depth = depth});
  };
  EXPECT_EQ(of(512, 768).small, true);
  EXPECT_EQ(of(257, 768).small, true);
  EXPECT_EQ(of(256, 768), ProductChoice());
  EXPECT_EQ(of(513, 768), ProductChoice());
  EXPECT_EQ(of(512, 769), ProductChoice());
  // Rows of a call are a gradient's depth.
  ProductDesc gradient = {.rows = 768, .columns = 3072, .depth = 400};
  EXPECT_EQ(tuning.Of(KernelKind::kProductDepthDepth, gradient).gradient_columns, 128);
  EXPECT_EQ(tuning.Of(KernelKind::kProductRowsDepth, gradient), ProductChoice());
  gradient.depth = 1000;
  EXPECT_EQ(tuning.Of(KernelKind::kProductDepthDepth, gradient), ProductChoice());
}

class PlanSearchTest : public testing::Test {
 protected:
  PlanSearchTest() { std::filesystem::remove_all(folder_); }

  PlanSearch::Choice Choose(PlanSearch& search, const ModuleGraph& graph, int64_t rows) {
    absl::StatusOr<PlanSearch::Choice> choice =
        search.Choose(graph, {.max_rows = rows, .kept_rows = rows},
                      [&]() -> absl::StatusOr<std::unique_ptr<SegmentBench>> {
                        ++benches_;
                        auto bench = std::make_unique<FakeBench>();
                        bench->small_ = 0.9;
                        bench->finished_ = &finished_;
                        bench->joined_ = {{{Direction::kForward, 3}, 50}};
                        return bench;
                      });
    EXPECT_TRUE(choice.ok()) << choice.status();
    return *choice;
  }
  std::shared_ptr<PlanCache> Cache() const { return std::make_shared<PlanCache>(folder_); }

  const std::string folder_ = absl::StrCat(testing::TempDir(), "/plan_search");
  int benches_ = 0, finished_ = 0;
};

TEST_F(PlanSearchTest, MeasuresNothingTwice) {
  PlanSearch first("gpu", kSearchedGpu, Cache());
  const PlanSearch::Choice found = Choose(first, Bert(), 512);
  EXPECT_EQ(benches_, 1);
  EXPECT_EQ(found.tuning.products.count(kSizedProduct), 1);
  EXPECT_EQ(first.totals().searched_blocks, 1);
  EXPECT_GT(first.totals().samples, 0);

  PlanSearch second("gpu", kSearchedGpu, Cache());
  // The same power of two.
  const PlanSearch::Choice again = Choose(second, Bert(), 300);
  EXPECT_EQ(benches_, 1);
  EXPECT_EQ(again.blocks[0].forward, found.blocks[0].forward);
  EXPECT_EQ(again.blocks[0].backward, found.blocks[0].backward);
  EXPECT_EQ(again.tuning.products, found.tuning.products);
  EXPECT_EQ(again.tuning.rows_bucket, 512);
  EXPECT_EQ(second.totals().kept_blocks, 1);
  EXPECT_EQ(second.totals().samples, 0);

  // Other rows, elements, GPUs.
  Choose(second, Bert(), 513);
  EXPECT_EQ(benches_, 2);
  Choose(second, Bert(ElementType::kBFloat16), 512);
  EXPECT_EQ(benches_, 3);
  PlanSearch other("another gpu", kSearchedGpu, Cache());
  Choose(other, Bert(), 512);
  EXPECT_EQ(benches_, 4);
  PlanSearch without("gpu", kSearchedGpu, nullptr);
  Choose(without, Bert(), 512);
  EXPECT_EQ(benches_, 5);
  EXPECT_EQ(finished_, 5);
}

TEST_F(PlanSearchTest, MeasuresAgainWhatIsKeptAndNotLegal) {
  const ModuleGraph graph = Bert();
  PlanSearch search("gpu", kSearchedGpu, Cache());
  const std::string key = search.KeyOf(graph, 0, {.max_rows = 512, .kept_rows = 512});
  const BlockEnds single = SingleOps(graph, 0);
  const SegmentEnds with_a_product = {1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14};
  for (const BlockEnds& wrong :
       {BlockEnds{with_a_product, single.backward}, BlockEnds{single.forward, with_a_product},
        BlockEnds{single.forward, {}}, BlockEnds{{0, 14}, single.backward}}) {
    ASSERT_TRUE(Cache()->Put(key, {wrong, {}}).ok());
    benches_ = 0;
    const PlanSearch::Choice choice = Choose(search, graph, 512);
    EXPECT_EQ(benches_, 1);
    EXPECT_TRUE(SchemeOf(graph, 0, choice.blocks[0]).ok());
  }
}

TEST_F(PlanSearchTest, SaysWhatTheBenchSays) {
  PlanSearch search("gpu", kSearchedGpu, Cache());
  const absl::Status status = search
                                  .Choose(Bert(), {.max_rows = 512},
                                          []() -> absl::StatusOr<std::unique_ptr<SegmentBench>> {
                                            return absl::InternalError("the GPU was lost");
                                          })
                                  .status();
  EXPECT_EQ(status, absl::InternalError("the GPU was lost"));
}

}  // namespace
}  // namespace attnd
