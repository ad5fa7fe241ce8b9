// A norm's gradient that brings the sums of its parameters along, on emulated GPUs: the bits of the
// launches apart, and where one launch makes both.
#include <array>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/emulator/device/emulated_device.h"
#include "tests/emulator/device/emulated_engine.h"
#include "tests/layers/device_tensors.h"

namespace attnd {
namespace {

constexpr ElementType kHalf = ElementType::kFloat16, kFloat = ElementType::kFloat32;

struct Case {
  int64_t vectors, count;
  bool brings;
  bool is_centred = true, has_bias = true, adds = false;
  std::optional<ElementType> rounds = std::nullopt;
};

// A residual's gradient and dropout's behind a norm's, as a layer has them.
class NormGradient {
 public:
  explicit NormGradient(const Case& of)
      : of_(of),
        engine_(cuda::MakeEmulatedDevice(
            {.architecture = Architecture::kSm70,
             .multiprocessors = 2,
             .shared = {.count_conflicts = false, .detect_races = true},
             .observer = [this](const KernelRow& row,
                                const emulator::LaunchReport&) { names_.insert(NameOf(row)); }})),
        tensors_(engine_, 8 * of.vectors * of.count) {
    Random random(static_cast<uint64_t>(of.count));
    const auto draw = [&](int64_t count, ElementType element) {
      return tensors_.Put(RandomNumbers(random, count, Rounder(Rounding::kElements), element),
                          element);
    };
    const int64_t numbers = of.vectors * of.count;
    x_ = draw(numbers, kHalf), dy_ = draw(numbers, kHalf), dx_ = draw(numbers, kHalf);
    residual_ = draw(numbers, kHalf), dropped_ = draw(numbers, kHalf);
    weight_ = draw(of.count, kFloat);
    d_weight_ = draw(of.count, kFloat), d_bias_ = draw(of.count, kFloat);
    statistics_ = draw(2 * of.vectors, kFloat);
    old_ = {Numbers(), tensors_.Get(dx_, numbers), tensors_.Get(d_weight_, of.count),
            tensors_.Get(d_bias_, of.count)};
  }

  using Results = std::array<Numbers, 5>;
  Results Run(bool is_segment) {
    const int64_t numbers = of_.vectors * of_.count;
    tensors_.Set(dx_, old_[1]);
    tensors_.Set(d_weight_, old_[2]);
    tensors_.Set(d_bias_, old_[3]);
    names_.clear();
    CudaDevice& device = tensors_.device();
    const void* const unread[] = {dx_.data};
    if (is_segment) device.BeginSegment({unread, of_.adds ? 0u : 1u});
    auto* statistics = static_cast<NormStatistics*>(statistics_.data);
    const NormOperands norm{.count = of_.count,
                            .is_centred = of_.is_centred,
                            .epsilon = 1e-5f,
                            .weight_offset = 0.25f,
                            .round_before_weight = of_.rounds,
                            .weight = weight_,
                            .x = x_};
    device.NormBackward(norm, dy_, dx_, of_.adds, statistics, of_.vectors);
    device.AddNormGradients(norm,
                            {.dy = dy_,
                             .statistics = statistics,
                             .vectors = of_.vectors,
                             .d_weight = static_cast<float*>(d_weight_.data),
                             .d_bias = of_.has_bias ? static_cast<float*>(d_bias_.data) : nullptr});
    device.Combine(Combination::kScaled, dx_, 1, dx_, residual_, false, numbers);
    device.Drop({.seed = 7, .threshold = 26}, dx_, dropped_, false, of_.vectors, of_.count);
    if (is_segment) device.EndSegment();
    CheckOk(device.Finish());
    return {tensors_.Get(residual_, numbers), tensors_.Get(dropped_, numbers),
            tensors_.Get(d_weight_, of_.count), tensors_.Get(d_bias_, of_.count),
            tensors_.Get(statistics_, 2 * of_.vectors)};
  }
  bool HasBrought() const { return names_.count("dense_norm_sums") != 0; }

 private:
  const Case of_;
  std::set<std::string> names_;
  cuda::CudaBackend engine_;
  DeviceTensors tensors_;
  Tensor x_, dy_, dx_, residual_, dropped_, weight_, d_weight_, d_bias_, statistics_;
  std::array<Numbers, 4> old_;
};

TEST(NormSums, AreOfTheSameBitsInOneLaunch) {
  const Case cases[] = {{.vectors = 64, .count = 768, .brings = true},
                        // Several blocks of rows, the last one short; columns in part.
                        {.vectors = 2144, .count = 136, .brings = true},
                        {.vectors = 96, .count = 520, .brings = true, .is_centred = false},
                        {.vectors = 96, .count = 264, .brings = true, .rounds = kHalf},
                        {.vectors = 96, .count = 200, .brings = true, .adds = true},
                        // Too few, in no stretches, too narrow and too wide; and no bias.
                        {.vectors = 32, .count = 768, .brings = false},
                        {.vectors = 80, .count = 136, .brings = false},
                        {.vectors = 96, .count = 128, .brings = false},
                        {.vectors = 96, .count = 776, .brings = false},
                        {.vectors = 96, .count = 136, .brings = false, .has_bias = false}};
  for (const Case& of : cases) {
    SCOPED_TRACE(absl::StrCat(of.vectors, "x", of.count));
    NormGradient gradient(of);
    const NormGradient::Results apart = gradient.Run(false);
    EXPECT_FALSE(gradient.HasBrought());
    const NormGradient::Results joined = gradient.Run(true);
    EXPECT_EQ(gradient.HasBrought(), of.brings);
    for (size_t n = 0; n < apart.size(); ++n) EXPECT_TRUE(SameBits(joined[n], apart[n])) << n;
  }
}

}  // namespace
}  // namespace attnd
