// Tiles of a bool mask that hold nothing are not visited, and leaving them out changes no bit.
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/element.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "gtest/gtest.h"
#include "kernels/engine/cuda_backend.h"
#include "kernels/engine/device/emulated_device.h"
#include "tests/conformance/conformance_launch.h"

namespace attnd::cuda {
namespace {

BothResults RunChecked(Backend& backend, const Problem& p, const ProblemInputs& in) {
  auto results = RunBothWays(backend, p, in);
  CHECK(results.ok()) << results.status();
  return *std::move(results);
}

Problem Sized(int64_t q_len, int64_t kv_len, int64_t dim) {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.qk_head_dim = p.v_head_dim = dim;
  p.element = ElementType::kFloat16;
  p.bool_mask = BoolMask{{1, 1, q_len, kv_len}};
  return p;
}

// Barriers of the main kernels, which grow with what is visited alone.
class Visits {
 public:
  Visits() : backend_(MakeEmulatedDevice(Options())) {}

  // Blocks of 128 rows × 32 keys of the mask are visible where `tiles` says so.
  std::pair<int64_t, int64_t> Count(const Problem& p, const std::vector<std::vector<int>>& tiles) {
    ProblemInputs in = RandomInputs(p, 1);
    const int64_t row_bytes = p.bool_mask->row_bytes();
    for (int64_t i = 0; i < p.q_len; ++i) {
      for (int64_t n = 0; n < row_bytes; ++n) {
        in.mask_bits.as<uint8_t>()[i * row_bytes + n] = tiles[i / 128][n / 4] != 0 ? 0xff : 0;
      }
    }
    barriers_.clear();
    RunChecked(backend_, p, in);
    return {barriers_[KernelKind::kForward], barriers_[KernelKind::kBackward]};
  }

 private:
  EmulatedDeviceOptions Options() {
    EmulatedDeviceOptions options;
    options.observer = [this](const KernelRow& row, const emulator::LaunchReport& report) {
      barriers_[row.kind] += report.barriers;
    };
    return options;
  }
  std::map<KernelKind, int64_t> barriers_;
  CudaBackend backend_;
};

TEST(MaskTiles, EmptyOnesAreNotVisited) {
  for (int64_t dim : {64, 128, 256}) {
    Visits visits;
    // 128 rows; four of eight tiles of keys in two runs, against four tiles that are all there are.
    const auto some = visits.Count(Sized(128, 256, dim), {{0, 1, 1, 0, 0, 1, 0, 1}});
    const auto all = visits.Count(Sized(128, 128, dim), {{1, 1, 1, 1}});
    EXPECT_EQ(some.first, all.first) << "forward, head_dim " << dim;
    // 128 keys; two of four tiles of rows (four of eight rounds).
    const auto rows = visits.Count(Sized(512, 128, dim),
                                   {{0, 0, 0, 0}, {1, 1, 1, 1}, {0, 0, 0, 0}, {1, 1, 1, 1}});
    const auto all_rows = visits.Count(Sized(256, 128, dim), {{1, 1, 1, 1}, {1, 1, 1, 1}});
    EXPECT_EQ(rows.second, all_rows.second) << "backward, head_dim " << dim;
    const auto most = visits.Count(Sized(128, 256, dim), {{1, 1, 1, 1, 1, 1, 1, 1}});
    EXPECT_GT(most.first, all.first) << "else barriers say nothing";
  }
}

struct Case {
  std::string name;
  Problem problem;
  int64_t padding = 0;  // keys at the end that no row sees
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (int64_t dim : {32, 64, 96, 128, 256}) {
    cases.push_back({absl::StrCat("head_dim ", dim), Sized(200, 330, dim)});
  }
  Problem p = Sized(330, 330, 64);
  p.causal = true;
  p.alignment = Alignment::kTopLeft;
  cases.push_back({"causal", p});
  p.window_left = 100;
  p.causal = false;
  p.window_right = 70;
  cases.push_back({"window", p});
  p = Sized(140, 330, 64);
  p.batch = 2;
  p.kv_lengths = {330, 129};
  cases.push_back({"key lengths, one mask for both entries", p});
  p.kv_lengths.clear();
  p.q_heads = 6;
  p.kv_heads = 2;
  p.bool_mask->shape.heads = 6;
  cases.push_back({"a mask for each query head of a group", p});
  p.bool_mask = BoolMask{{2, 1, 1, 330}};
  cases.push_back({"one row for all", p});
  cases.push_back({"one row for all, padded", p, 200});
  p.bool_mask = BoolMask{{1, 6, 140, 1}};
  cases.push_back({"one column for all", p});
  p = Sized(300, 400, 64);
  p.layout = Layout::kPackedThd;
  p.batch = 3;
  p.cu_seqlens_q = {0, 130, 131, 300};
  p.cu_seqlens_k = {0, 70, 170, 400};
  p.bool_mask = BoolMask{{3, 1, 169, 230}};
  cases.push_back({"packed", p});
  p = Sized(200, 330, 64);
  p.dropout.threshold = 26;
  p.denominator = DenominatorKind::kZeroRest;
  cases.push_back({"dropout and zero_rest", p});
  return cases;
}

// Whole bytes of each row.
void Pad(const BoolMask& mask, int64_t keys, ProblemInputs& in) {
  for (int64_t n = 0; n < in.mask_bits.size(); ++n) {
    if (n % mask.row_bytes() >= mask.row_bytes() - keys / 8) in.mask_bits.data()[n] = std::byte{0};
  }
}

// The same mask as a bias, of which nothing is known before its tiles are visited.
void MaskByBias(Problem& p, ProblemInputs& in) {
  const BoolMask mask = *p.bool_mask;
  p.bias = Bias{ElementType::kFloat16, mask.shape, false};
  in.bias = AlignedBytes(mask.shape.elements() * 2);
  for (int64_t n = 0; n < mask.shape.elements(); ++n) {
    const int64_t row = n / mask.shape.columns, column = n % mask.shape.columns;
    const uint8_t byte = in.mask_bits.as<uint8_t>()[row * mask.row_bytes() + column / 8];
    const bool visible = byte >> (column % 8) & 1;
    StoreElement(ElementType::kFloat16, in.bias.data(), n,
                 visible ? 0.0f : -std::numeric_limits<float>::infinity());
  }
  p.bool_mask.reset();
  in.mask_bits = AlignedBytes();
}

TEST(MaskTiles, ResultsHaveTheBitsOfABiasThatHidesTheSame) {
  CudaBackend backend(MakeEmulatedDevice({}));
  for (Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    ASSERT_TRUE(Validate(c.problem).ok()) << Validate(c.problem);
    ProblemInputs in = RandomInputs(c.problem, 7);
    Pad(*c.problem.bool_mask, c.padding, in);
    const BothResults masked = RunChecked(backend, c.problem, in);
    MaskByBias(c.problem, in);
    const BothResults biased = RunChecked(backend, c.problem, in);
    EXPECT_EQ(masked.forward.o, biased.forward.o);
    EXPECT_EQ(masked.forward.lse, biased.forward.lse);
    EXPECT_EQ(masked.backward.d_q, biased.backward.d_q);
    EXPECT_EQ(masked.backward.d_k, biased.backward.d_k);
    EXPECT_EQ(masked.backward.d_v, biased.backward.d_v);
  }
}

}  // namespace
}  // namespace attnd::cuda
