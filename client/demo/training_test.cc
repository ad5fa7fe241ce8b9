// The demo's training through a real daemon, and that its comparison would notice wrong attention.
#include "client/demo/training.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "client/demo/local_attention.h"
#include "client/demo/remote_attention.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/fixtures/daemon_fixture.h"

namespace attnd::demo {
namespace {

constexpr double kTolerance = 1e-3;  // of train.cc

constexpr absl::string_view kText =
    "Pack my box with five dozen liquor jugs. The quick brown fox jumps over the lazy dog. "
    "Pack my box with five dozen liquor jugs. The quick brown fox jumps over the lazy dog. ";

TrainingOptions SmallOptions() {
  return {.steps = 40,
          .batch = 8,
          .shape = {.context = 16, .layers = 2, .heads = 2, .head_dim = 8, .dropout = 0.1f},
          .seed = 3};
}

LossCurves Train(AttentionSource& source) {
  absl::StatusOr<LossCurves> curves =
      TrainTwice(SmallOptions(), CharacterText(kText), source, [](const LossCurves&) {});
  EXPECT_TRUE(curves.ok()) << curves.status();
  return *std::move(curves);
}

TEST(Training, OnADaemonFollowsLocalFloat64Attention) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  ClientOptions options;
  options.addresses = {daemon.address()};
  auto client = AttentionClient::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  RemoteAttention remote(*std::move(client));
  LossCurves curves = Train(remote);
  EXPECT_LT(curves.LargestDeviation(), kTolerance);
  EXPECT_LT(curves.Last(), 0.9 * curves.First());
  EXPECT_EQ(remote.calls(), 40 * 2 * 2);  // steps × layers × directions
  EXPECT_GT(remote.bytes(), 0);
}

// Local attention whose problem or gradients were tampered with.
class WrongAttention final : public AttentionSource {
 public:
  WrongAttention(std::function<void(Problem&)> change, float d_k_factor)
      : change_(std::move(change)), d_k_factor_(d_k_factor) {}
  absl::Status Forward(const Problem& p, const AttentionInputs& in, float* o, float* l) override {
    return local_.Forward(Changed(p), in, o, l);
  }
  absl::Status Backward(const Problem& p, const AttentionInputs& in, const float* o, const float* l,
                        const float* d_o, const AttentionGradients& g) override {
    absl::Status status = local_.Backward(Changed(p), in, o, l, d_o, g);
    for (int64_t i = 0; i < p.KeyElements(); ++i) g.d_k[i] *= d_k_factor_;
    return status;
  }

 private:
  Problem Changed(Problem problem) const {
    change_(problem);
    return problem;
  }
  LocalAttention local_;
  std::function<void(Problem&)> change_;
  float d_k_factor_;
};

TEST(Training, NoticesWrongAttention) {
  struct Case {
    const char* name;
    std::function<void(Problem&)> change;
    float d_k_factor;
  };
  for (const Case& wrong : {Case{"mask off by one",
                                 [](Problem& p) {
                                   p.alignment = Alignment::kOffsets;
                                   p.offsets = {1};
                                 },
                                 1},
                            Case{"other dropout", [](Problem& p) { ++p.dropout.seed; }, 1},
                            Case{"no dropout", [](Problem& p) { p.dropout.threshold = 0; }, 1},
                            Case{"no scale", [](Problem& p) { p.scale = 1; }, 1},
                            Case{"dK without scale", [](Problem&) {}, std::sqrt(8.0f)}}) {
    WrongAttention source(wrong.change, wrong.d_k_factor);
    EXPECT_GT(Train(source).LargestDeviation(), kTolerance) << wrong.name;
  }
}

TEST(LossCurves, DeviationOfNaNIsNaN) {
  LossCurves curves{.tested = {1, std::numeric_limits<double>::quiet_NaN(), 1}, .local = {1, 1, 1}};
  EXPECT_TRUE(std::isnan(curves.LargestDeviation()));
}

}  // namespace
}  // namespace attnd::demo
