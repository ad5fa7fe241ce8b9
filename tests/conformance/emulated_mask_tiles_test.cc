// Tiles of a bool mask that hold nothing are not visited, and leaving them out changes no bit.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/element.h"
#include "attention/masks/mask_description.h"
#include "attention/problem.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "base/round_up.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/conformance/conformance_launch.h"
#include "tests/emulator/device/emulated_device.h"
#include "tests/emulator/device/emulated_engine.h"

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
  p.dropout.threshold = 0;
  p.accumulate = AccumulateType::kFloat16;
  cases.push_back({"float16 accumulators and zero_rest", p});
  p = Sized(140, 330, 40);
  p.element = ElementType::kBFloat16;  // a part for each entry and key head
  p.batch = 2;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.bool_mask->shape.batch = 2;
  p.bool_mask->shape.heads = 4;
  cases.push_back({"bfloat16", p});
  return cases;
}

// Hides the last `keys` from every row, whole bytes of them.
void Pad(const BoolMask& mask, int64_t keys, ProblemInputs& in) {
  for (int64_t n = 0; n < in.mask_bits.size(); ++n) {
    if (n % mask.row_bytes() >= mask.row_bytes() - keys / 8) in.mask_bits.data()[n] = std::byte{0};
  }
}

bool IsVisible(const BoolMask& mask, const ProblemInputs& in, int64_t line, int64_t column) {
  const uint8_t byte = in.mask_bits.as<uint8_t>()[line * mask.row_bytes() + column / 8];
  return byte >> (column % 8) & 1;
}

bool IsSeen(const Problem& p, const ProblemInputs& in, int64_t entry, int64_t kv_head,
            int64_t key) {
  const BroadcastShape& shape = p.bool_mask->shape;
  for (int64_t h = kv_head * p.group_size(); h < (kv_head + 1) * p.group_size(); ++h) {
    const int64_t first = (shape.batch == 1 ? 0 : entry) * shape.heads + (shape.heads == 1 ? 0 : h);
    for (int64_t row = 0; row < shape.rows; ++row) {
      if (IsVisible(*p.bool_mask, in, first * shape.rows + row, key)) return true;
    }
  }
  return false;
}
// Zeros in keys and values that the mask hides from every row: they are left out of the bounds of K
// and V, which a bias does not change. Where one row of bits is for all; else there are none.
void ZeroHidden(const Problem& p, ProblemInputs& in) {
  if (p.bool_mask->shape.rows != 1) return;
  for (int64_t n = 0; n < p.batch * p.kv_heads * p.kv_len; ++n) {
    const int64_t head = n / p.kv_len;
    if (IsSeen(p, in, head / p.kv_heads, head % p.kv_heads, n % p.kv_len)) continue;
    std::memset(in.k.data() + n * p.qk_head_dim * 2, 0, static_cast<size_t>(p.qk_head_dim * 2));
    std::memset(in.v.data() + n * p.v_head_dim * 2, 0, static_cast<size_t>(p.v_head_dim * 2));
  }
}

// A bias of nothing beside the mask, so that both have the same kind of scores.
void AddEmptyBias(Problem& p, ProblemInputs& in) {
  p.bias = Bias{ElementType::kFloat16, p.bool_mask->shape, false};
  in.bias = AlignedBytes(p.bool_mask->shape.elements() * 2);
  for (int64_t n = 0; n < p.bool_mask->shape.elements(); ++n) {
    StoreElement(ElementType::kFloat16, in.bias.data(), n, 0);
  }
}

// The same mask as a bias, of which nothing is known before its tiles are visited.
void MaskByBias(Problem& p, ProblemInputs& in) {
  const BoolMask mask = *p.bool_mask;
  for (int64_t n = 0; n < mask.shape.elements(); ++n) {
    if (IsVisible(mask, in, n / mask.shape.columns, n % mask.shape.columns)) continue;
    StoreElement(ElementType::kFloat16, in.bias.data(), n, -std::numeric_limits<float>::infinity());
  }
  p.bool_mask.reset();
  in.mask_bits = AlignedBytes();
}

// The same mask by description: each (b, h) that may differ has a pattern of bits.
void MaskByDescription(Problem& p, ProblemInputs& in) {
  const BoolMask mask = *p.bool_mask;
  const BroadcastShape& shape = mask.shape;
  p.bool_mask.reset();
  const MaskCall call = MaskCallOf(p);
  MaskSpec spec;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      MaskBitmap bits{.row_pitch_bits = static_cast<uint32_t>((call.keys + 7) / 8 * 8)};
      bits.data.resize(static_cast<size_t>(call.rows * bits.row_pitch_bits / 8));
      for (int64_t row = 0; row < call.rows; ++row) {
        for (int64_t key = 0; key < call.keys; ++key) {
          const int64_t line = (b * shape.heads + h) * shape.rows + (shape.rows == 1 ? 0 : row);
          if (!IsVisible(mask, in, line, shape.columns == 1 ? 0 : key)) continue;
          bits.data[static_cast<size_t>(row * bits.row_pitch_bits + key) / 8] |=
              static_cast<uint8_t>(1 << (key % 8));
        }
      }
      spec.pattern.emplace_back(std::move(bits));
    }
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.q_heads; ++h) {
      spec.pattern_of.push_back(static_cast<uint32_t>((shape.batch == 1 ? 0 : b) * shape.heads +
                                                      (shape.heads == 1 ? 0 : h)));
    }
  }
  auto description = MaskDescription::Make(spec, call);
  CHECK(description.ok()) << description.status();
  p.mask = *std::move(description);
  in.mask_bits = AlignedBytes();
}

// Where two tensors differ first, and in how many bytes.
void ExpectSame(const char* name, const Bytes& got, const Bytes& want) {
  ASSERT_EQ(got.size(), want.size()) << name;
  int64_t different = 0, first = -1;
  for (size_t n = 0; n < got.size(); ++n) {
    if (got[n] == want[n]) continue;
    if (different++ == 0) first = static_cast<int64_t>(n);
  }
  EXPECT_EQ(different, 0) << name << ": of " << got.size() << " bytes, the first at " << first;
}
void ExpectSameBits(const BothResults& got, const BothResults& want) {
  ExpectSame("o", got.forward.o, want.forward.o);
  ExpectSame("lse", got.forward.lse, want.forward.lse);
  ExpectSame("d_q", got.backward.d_q, want.backward.d_q);
  ExpectSame("d_k", got.backward.d_k, want.backward.d_k);
  ExpectSame("d_v", got.backward.d_v, want.backward.d_v);
}

// Rows up to whole warps: what a warp's rows have in common shows in the last bits, and rows beyond
// the sequence are hidden by a mask but by no bias.
void FillWarps(Problem& p) {
  const auto filled = [](int64_t rows) { return RoundUp(rows, 32); };
  if (p.cu_seqlens_q.empty()) {
    p.q_len = filled(p.q_len);
  } else {
    int64_t end = 0;
    std::vector<int32_t> ends = {0};
    for (size_t n = 1; n < p.cu_seqlens_q.size(); ++n) {
      end += filled(p.cu_seqlens_q[n] - p.cu_seqlens_q[n - 1]);
      ends.push_back(static_cast<int32_t>(end));
    }
    p.cu_seqlens_q = ends;
    p.q_len = end;
  }
  BroadcastShape& mask = p.bool_mask->shape;
  if (mask.rows > 1) mask.rows = filled(mask.rows);
}

TEST(MaskTiles, ResultsHaveTheBitsOfABiasThatHidesTheSame) {
  CudaBackend backend(MakeEmulatedDevice({}));
  for (Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    FillWarps(c.problem);
    ASSERT_TRUE(Validate(c.problem).ok()) << Validate(c.problem);
    ProblemInputs in = RandomInputs(c.problem, 7);
    Pad(*c.problem.bool_mask, c.padding, in);
    ZeroHidden(c.problem, in);
    AddEmptyBias(c.problem, in);
    const BothResults masked = RunChecked(backend, c.problem, in);
    MaskByBias(c.problem, in);
    ExpectSameBits(masked, RunChecked(backend, c.problem, in));
  }
}

// By the same tiles, whether lists are held on the device or go with the launch.
TEST(MaskTiles, ResultsHaveTheBitsOfTheSameMaskByDescription) {
  for (int64_t held : {0, 1 << 24}) {
    CudaBackend backend(MakeEmulatedDevice({.mask_bytes = held}), nullptr, MaskWay::kListed);
    for (Case& c : Cases()) {
      SCOPED_TRACE(c.name);
      ProblemInputs in = RandomInputs(c.problem, 7);
      Pad(*c.problem.bool_mask, c.padding, in);
      const BothResults masked = RunChecked(backend, c.problem, in);
      MaskByDescription(c.problem, in);
      ASSERT_TRUE(Validate(c.problem).ok()) << Validate(c.problem);
      ExpectSameBits(RunChecked(backend, c.problem, in), masked);
      if (held > 0) ExpectSameBits(RunChecked(backend, c.problem, in), masked);
    }
  }
}

// Squares of 32 rows and keys, one in ten of them, beside those of one key in four rows; the second
// head has a row block that sees nothing, and V has an infinity that few rows see.
Case Squares(int64_t dim, uint32_t threshold) {
  Problem p = Sized(300, 520, dim);
  p.q_heads = 2;
  p.bool_mask->shape.heads = 2;
  p.dropout.threshold = threshold;
  return {absl::StrCat("squares, head_dim ", dim, ", dropout ", threshold), p};
}
void DrawSquares(const Problem& p, ProblemInputs& in) {
  const BoolMask& mask = *p.bool_mask;
  for (int64_t line = 0; line < mask.shape.heads * p.q_len; ++line) {
    const int64_t h = line / p.q_len, row = line % p.q_len;
    for (int64_t key = 0; key < p.kv_len; ++key) {
      const int64_t square = row / 32 * 7 + key / 32 * 3;
      const bool is_alone = square % 10 == 5 && row % 4 == 1 && key % 32 == 9;
      const bool is_shown = (square % 10 == 0 || is_alone) && !(h == 1 && row / 32 == 3);
      uint8_t& byte = in.mask_bits.as<uint8_t>()[line * mask.row_bytes() + key / 8];
      byte = static_cast<uint8_t>((byte & ~(1 << (key % 8))) | (is_shown ? 1 << (key % 8) : 0));
    }
  }
  StoreElement(p.element, in.v.data(), 41 * p.v_head_dim + 3,
               std::numeric_limits<float>::infinity());
}

LaunchOutcome<ForwardResults> RunForward(Backend& backend, const std::vector<LaunchItem>& items) {
  auto launched = LaunchForward(backend, *MakeHostCallMemory(), items);
  CHECK(launched.ok()) << launched.status();
  return *std::move(launched);
}

// Compares two roundings of one sum.
void ExpectClose(ElementType element, const Bytes& got, const Bytes& want,
                 double of_largest = 0x1p-20) {
  ASSERT_EQ(got.size(), want.size());
  const int64_t count = static_cast<int64_t>(got.size()) / ElementBytes(element);
  const double unit = element == ElementType::kBFloat16  ? 0x1p-8
                      : element == ElementType::kFloat16 ? 0x1p-11
                                                         : 0x1p-22;
  double largest = 0;
  const auto at = [&](const Bytes& of, int64_t n) { return LoadElement(element, of.data(), n); };
  for (int64_t n = 0; n < count; ++n) {
    if (std::isfinite(at(want, n))) largest = std::max(largest, std::fabs(double{at(want, n)}));
  }
  for (int64_t n = 0; n < count; ++n) {
    const double a = at(got, n), b = at(want, n);
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    ASSERT_LE(std::fabs(a - b), 2 * unit * std::fabs(b) + of_largest * largest) << n << ": " << b;
  }
}

// The emulator has sm_80's kernels of float16 up to 64 columns.
class SmallTiles : public ::testing::TestWithParam<Architecture> {
 protected:
  std::unique_ptr<Backend> Make(MaskWay way) const {
    EmulatedDeviceOptions options = {.architecture = GetParam()};
    options.shared.detect_races = way == MaskWay::kSmall;
    return MakeEmulatedEngine(options, way);
  }
  bool Has(const Problem& p) const {
    if (GetParam() == Architecture::kSm70) return p.v_head_dim <= 128;
    return p.v_head_dim <= 64 && p.element == ElementType::kFloat16;
  }
};
INSTANTIATE_TEST_SUITE_P(Of, SmallTiles,
                         ::testing::Values(Architecture::kSm70, Architecture::kSm80),
                         [](const auto& of) { return std::string(InfoOf(of.param).name); });

std::vector<Case> CasesOfSmallTiles() {
  std::vector<Case> cases = Cases();
  for (int64_t dim : {24, 32, 64, 128}) {
    for (uint32_t threshold : {0, 26}) cases.push_back(Squares(dim, threshold));
  }
  return cases;
}

// Stabilisers of sm_80 grow tile by tile of keys, so that its probabilities round otherwise.
TEST_P(SmallTiles, ForwardIsThatOfLargerTiles) {
  const auto listed = Make(MaskWay::kListed), small = Make(MaskWay::kSmall);
  for (Case& c : CasesOfSmallTiles()) {
    SCOPED_TRACE(c.name);
    Problem& p = c.problem;
    ProblemInputs in = RandomInputs(p, 7);
    Pad(*p.bool_mask, c.padding, in);
    if (c.name.starts_with("squares")) DrawSquares(p, in);
    MaskByDescription(p, in);
    const bool has_small = Has(p) && p.accumulate == AccumulateType::kFloat32;
    const absl::Status supported = small->Supports(p, Direction::kForward);
    EXPECT_EQ(supported.ok(), has_small) << supported;
    if (!has_small) continue;
    const std::vector<LaunchItem> once = {{.problem = &p, .inputs = &in}};
    const auto want = RunForward(*listed, once), got = RunForward(*small, once);
    EXPECT_NE(got.report.kernel.find("_small"), std::string::npos) << got.report.kernel;
    if (GetParam() == Architecture::kSm70) {
      ExpectSame("o", got.results[0].o, want.results[0].o);
      ExpectSame("lse", got.results[0].lse, want.results[0].lse);
    } else {
      ExpectClose(p.element, got.results[0].o, want.results[0].o, 0x1p-11);
      ExpectClose(ElementType::kFloat32, got.results[0].lse, want.results[0].lse);
    }
  }
}

TEST_P(SmallTiles, BackwardHasTheBitsOfLargerTilesButForDq) {
  const auto listed = Make(MaskWay::kListed), small = Make(MaskWay::kSmall);
  for (Case& c : CasesOfSmallTiles()) {
    SCOPED_TRACE(c.name);
    Problem& p = c.problem;
    ProblemInputs in = RandomInputs(p, 7);
    Pad(*p.bool_mask, c.padding, in);
    if (c.name.starts_with("squares")) DrawSquares(p, in);
    MaskByDescription(p, in);
    const absl::Status supported = small->Supports(p, Direction::kBackward);
    EXPECT_EQ(supported.ok(), Has(p)) << supported;
    if (!supported.ok()) continue;
    auto forward = RunForward(*listed, {{.problem = &p, .inputs = &in}});
    const std::vector<LaunchItem> once = {{&p, &in, forward.results[0].o, forward.results[0].lse}};
    auto want = LaunchBackward(*listed, *MakeHostCallMemory(), once);
    auto got = LaunchBackward(*small, *MakeHostCallMemory(), once);
    ASSERT_TRUE(want.ok() && got.ok()) << want.status() << got.status();
    EXPECT_NE(got->report.kernel.find("_small"), std::string::npos) << got->report.kernel;
    ExpectSame("d_k", got->results[0].d_k, want->results[0].d_k);
    ExpectSame("d_v", got->results[0].d_v, want->results[0].d_v);
    ExpectClose(p.element, got->results[0].d_q, want->results[0].d_q);
  }
}

// The table's own masks, against the float64 reference, in shards, beside others and on repeat.
TEST_P(SmallTiles, Conform) {
  CudaBackend small(MakeEmulatedDevice({.architecture = GetParam()}), nullptr, MaskWay::kSmall);
  const ConformanceOptions options = {.precision = EnginePrecision::HalfOperands()};
  int checked = 0;
  for (ConformanceCase& c : NamedConformanceCases()) {
    Problem& p = c.problem;
    if (p.mask == nullptr || p.q_len * p.kv_len > 12000) continue;
    p.element = checked % 3 == 2 && GetParam() == Architecture::kSm70 ? ElementType::kBFloat16
                                                                      : ElementType::kFloat16;
    if (!small.Supports(p, Direction::kForward).ok()) continue;
    if (!small.Supports(p, Direction::kBackward).ok()) continue;
    c.brief = checked++ % 8 != 1;
    const CaseReport report = CheckCase(small, c, options);
    EXPECT_EQ(report.unsupported, 0) << c.name;
    for (const std::string& failure : report.failures) ADD_FAILURE() << c.name << ": " << failure;
  }
  EXPECT_GT(checked, 20);
}

}  // namespace
}  // namespace attnd::cuda
