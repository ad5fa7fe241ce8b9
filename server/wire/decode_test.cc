#include "server/wire/decode.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "base/clock.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/call/attention_tensors.h"
#include "server/call/status_details.h"
#include "tests/fixtures/sliced_buffer.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

MaskTable& Masks() {
  static const RealClock clock;
  static MaskTable store({}, clock);
  return store;
}

v1::RelativeWindow* SetWindowMask(v1::Problem& problem) {
  v1::MaskSpec& mask = *problem.mutable_mask();
  mask.set_version(1);
  mask.add_pattern_of(0);
  v1::RelativeWindow* window = mask.add_pattern()->mutable_expr()->mutable_window();
  window->set_left(3);
  window->set_right(0);
  return window;
}

absl::StatusOr<AttentionCall> DecodeText(const std::string& message,
                                         Direction direction = Direction::kForward,
                                         size_t slice_bytes = 1 << 16,
                                         absl::string_view caller = "caller") {
  return Decoder::Decode(MessageBytes(InSlicesOf(message, slice_bytes)), direction,
                         {Masks(), caller}, AnyRoom);
}

std::string PayloadOf(const AttentionCall& call, int tensor) {
  std::string bytes;
  for (const TensorSpec& spec : call.tensors()) {
    if (spec.id != tensor || spec.role != TensorUse::kInput) continue;
    const ByteRange range = {static_cast<int64_t>(spec.offset), spec.bytes};
    call.message().ForEachPiece(range, [&](absl::Span<const uint8_t> piece) {
      bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    });
  }
  return bytes;
}

std::vector<int> IdsOf(const AttentionCall& call, TensorUse role) {
  std::vector<int> ids;
  for (const TensorSpec& tensor : call.tensors()) {
    if (tensor.role == role) ids.push_back(tensor.id);
  }
  return ids;
}

std::string Varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
  return out;
}
std::string Tag(int number, int wire_type) {
  return Varint(static_cast<uint64_t>(number) << 3 | static_cast<uint64_t>(wire_type));
}
std::string VarintField(int number, uint64_t value) { return Tag(number, 0) + Varint(value); }
std::string BytesField(int number, const std::string& value) {
  return Tag(number, 2) + Varint(value.size()) + value;
}

v1::ForwardRequest Valid() { return MakeForward(SmallProblem(), 7); }

v1::BackwardRequest ValidBackward() {
  Problem p = SmallProblem();
  v1::ForwardResponse forward;
  forward.set_o(std::string(static_cast<size_t>(p.OutputElements() * 4), '\0'));
  forward.set_lse(std::string(static_cast<size_t>(p.LseElements() * 4), '\0'));
  return MakeBackward(p, 7, forward);
}

// A valid request with `problem_suffix` appended to the bytes of its problem.
std::string WithProblemBytes(const std::string& problem_suffix) {
  v1::ForwardRequest request = Valid();
  std::string problem = request.problem().SerializeAsString() + problem_suffix;
  request.clear_problem();
  return BytesField(1, problem) + request.SerializeAsString();
}

TEST(Decode, FindsEveryTensorWhenProblemsAreRandomAndSlicesAreSmall) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Problem problem = RandomProblem(seed, {.max_pairs = 1 << 9, .max_head_dim = 16});
    v1::ForwardRequest request = MakeForward(problem, seed);
    auto call = DecodeText(request.SerializeAsString(), Direction::kForward, 1 + seed % 97);
    ASSERT_TRUE(call.ok()) << "seed " << seed << ": " << call.status();
    EXPECT_EQ(PayloadOf(*call, Tensor::kQ), request.q()) << "seed " << seed;
    EXPECT_EQ(PayloadOf(*call, Tensor::kK), request.k()) << "seed " << seed;
    EXPECT_EQ(PayloadOf(*call, Tensor::kV), request.v()) << "seed " << seed;
    EXPECT_EQ(PayloadOf(*call, Tensor::kBias), request.bias()) << "seed " << seed;
    EXPECT_EQ(PayloadOf(*call, Tensor::kMaskBits), request.mask_bits()) << "seed " << seed;
    EXPECT_EQ(call->problem().ResolvedScale(), problem.ResolvedScale()) << "seed " << seed;
    EXPECT_EQ(call->problem().offsets, problem.offsets) << "seed " << seed;
    EXPECT_EQ(call->problem().dropout.threshold, problem.dropout.threshold) << "seed " << seed;
    EXPECT_EQ(call->output_bytes(),
              problem.LseElements() * 4 + problem.OutputElements() * ElementBytes(problem.element));
  }
}

TEST(Decode, AcceptsFieldsInAnyOrder) {
  v1::ForwardRequest request = Valid();
  std::string message =
      BytesField(22, request.q()) + VarintField(3, 1) + BytesField(21, request.v()) +
      BytesField(1, request.problem().SerializeAsString()) + BytesField(20, request.k());
  auto call = DecodeText(message);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(PayloadOf(*call, Tensor::kQ), request.q());
  EXPECT_EQ(PayloadOf(*call, Tensor::kK), request.k());
}

TEST(Decode, FindsTheRequestIdOfMessagesThatAreWrong) {
  const auto id_of = [](const std::string& text) {
    const MessageBytes message(InSlices({text}));
    return Decoder::RequestIdOf(message, {0, message.size()});
  };
  v1::ForwardRequest request = Valid();
  EXPECT_EQ(id_of(request.SerializeAsString()), "");
  request.clear_problem();
  request.mutable_options()->set_request_id(std::string(65, 'x'));
  const std::string text = request.SerializeAsString();
  EXPECT_EQ(id_of(text), std::string(64, 'x'));
  EXPECT_EQ(id_of(VarintField(30, 1) + BytesField(31, "?") + text), std::string(64, 'x'));
  for (const std::string& wrong :
       {std::string(), std::string(20, '\xff'), BytesField(2, "\xff\xff"),
        BytesField(2, std::string(5000, 0)), std::string("\x12\xff\xff\xff\xff\x0f", 6),
        std::string("\x1a\x70", 2)}) {
    EXPECT_EQ(id_of(wrong), "");
  }
  for (size_t size = 0; size < text.size(); ++size) id_of(text.substr(0, size));
}

TEST(Decode, TakesOptionsWhenGiven) {
  v1::ForwardRequest request = Valid();
  request.mutable_options()->set_priority(v1::PRIORITY_HIGH);
  request.mutable_options()->set_request_id("a-call");
  auto call = DecodeText(request.SerializeAsString());
  ASSERT_TRUE(call.ok());
  EXPECT_EQ(call->priority(), Priority::kHigh);
  EXPECT_EQ(call->request_id(), "a-call");
}

TEST(Decode, ListsDLseOnlyWhenItIsSent) {
  v1::BackwardRequest request = ValidBackward();
  auto with = DecodeText(request.SerializeAsString(), Direction::kBackward);
  ASSERT_TRUE(with.ok()) << with.status();
  EXPECT_EQ(PayloadOf(*with, Tensor::kDLse), request.d_lse());
  EXPECT_EQ(IdsOf(*with, TensorUse::kInput).back(), Tensor::kDLse);
  request.clear_d_lse();
  auto without = DecodeText(request.SerializeAsString(), Direction::kBackward);
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ(IdsOf(*without, TensorUse::kInput).back(), Tensor::kDO);
}

// ---- Everything wrong that a generated message can say.

struct BadForward {
  const char* name;
  std::function<void(v1::ForwardRequest&)> spoil;
  const char* message;  // a part of the status message, naming the field
  absl::string_view reason;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void SetPacked(v1::Problem& p, std::vector<uint32_t> q, std::vector<uint32_t> k) {
  p.set_layout(v1::LAYOUT_PACKED_THD);
  p.set_batch(2);
  for (uint32_t n : q) p.mutable_lengths()->add_cu_seqlens_q(n);
  for (uint32_t n : k) p.mutable_lengths()->add_cu_seqlens_k(n);
}

using Request = v1::ForwardRequest;

const std::vector<BadForward>& BadForwards() {
  static const std::vector<BadForward> cases = {
      {"ProblemAbsent", [](Request& r) { r.clear_problem(); }, "problem: expected a problem",
       reason::kBadField},
      {"BatchZero", [](Request& r) { r.mutable_problem()->set_batch(0); },
       "problem.batch: expected 1..1048576, got 0", reason::kBadShape},
      {"BatchHuge", [](Request& r) { r.mutable_problem()->set_batch(4000000000u); },
       "problem.batch: expected 1..1048576, got 4000000000", reason::kBadShape},
      {"QHeadsZero", [](Request& r) { r.mutable_problem()->set_q_heads(0); },
       "problem.q_heads:", reason::kBadShape},
      {"QHeadsHuge", [](Request& r) { r.mutable_problem()->set_q_heads(65537); },
       "problem.q_heads: expected 1..65536, got 65537", reason::kBadShape},
      {"KvHeadsZero", [](Request& r) { r.mutable_problem()->set_kv_heads(0); },
       "problem.kv_heads:", reason::kBadShape},
      {"KvHeadsNoDivisor", [](Request& r) { r.mutable_problem()->set_q_heads(3); },
       "problem.kv_heads: expected a divisor of q_heads = 3, got 2", reason::kBadShape},
      {"QLenZero", [](Request& r) { r.mutable_problem()->set_q_len(0); },
       "problem.q_len: expected 1..1048576, got 0", reason::kBadShape},
      {"QLenNegative",
       [](Request& r) { r.mutable_problem()->set_q_len(static_cast<uint32_t>(-1)); },
       "problem.q_len: expected 1..1048576, got 4294967295", reason::kBadShape},
      {"QLenTwoTo31", [](Request& r) { r.mutable_problem()->set_q_len(1u << 31); },
       "problem.q_len:", reason::kBadShape},
      {"KvLenZero", [](Request& r) { r.mutable_problem()->set_kv_len(0); },
       "problem.kv_len:", reason::kBadShape},
      {"KvLenHuge", [](Request& r) { r.mutable_problem()->set_kv_len((1u << 20) + 1); },
       "problem.kv_len:", reason::kBadShape},
      {"QkHeadDimZero", [](Request& r) { r.mutable_problem()->set_qk_head_dim(0); },
       "problem.qk_head_dim: expected 1..256, got 0", reason::kBadShape},
      {"QkHeadDimHuge", [](Request& r) { r.mutable_problem()->set_qk_head_dim(257); },
       "problem.qk_head_dim: expected 1..256, got 257", reason::kBadShape},
      {"VHeadDimZero", [](Request& r) { r.mutable_problem()->set_v_head_dim(0); },
       "problem.v_head_dim:", reason::kBadShape},
      {"VHeadDimHuge", [](Request& r) { r.mutable_problem()->set_v_head_dim(257); },
       "problem.v_head_dim:", reason::kBadShape},
      {"ProductOverflow",
       [](Request& r) {
         r.mutable_problem()->set_batch(1 << 20);
         r.mutable_problem()->set_q_heads(1 << 16);
         r.mutable_problem()->set_kv_heads(1 << 16);
         r.mutable_problem()->set_q_len(1 << 20);
         r.mutable_problem()->set_qk_head_dim(256);
       },
       "q: expected at most 1099511627776 elements", reason::kBadShape},
      {"DeclaredFarLargerThanSent", [](Request& r) { r.mutable_problem()->set_q_len(1 << 20); },
       "q: expected 67108864 bytes, got 1024 bytes", reason::kSizeMismatch},
      {"ElementUnspecified",
       [](Request& r) { r.mutable_problem()->set_element(v1::ELEMENT_UNSPECIFIED); },
       "problem.element:", reason::kBadDtype},
      {"ElementUnknown",
       [](Request& r) { r.mutable_problem()->set_element(static_cast<v1::Element>(9)); },
       "problem.element: expected ELEMENT_FLOAT16, ELEMENT_BFLOAT16 or ELEMENT_FLOAT32, got 9",
       reason::kBadDtype},
      {"ElementNegative",
       [](Request& r) { r.mutable_problem()->set_element(static_cast<v1::Element>(-1)); },
       "problem.element: expected ELEMENT_FLOAT16, ELEMENT_BFLOAT16 or ELEMENT_FLOAT32, got -1",
       reason::kBadDtype},
      {"LayoutUnspecified",
       [](Request& r) { r.mutable_problem()->set_layout(v1::LAYOUT_UNSPECIFIED); },
       "problem.layout:", reason::kBadShape},
      {"LayoutUnknown",
       [](Request& r) { r.mutable_problem()->set_layout(static_cast<v1::Layout>(5)); },
       "problem.layout:", reason::kBadShape},
      {"AccumulateUnknown",
       [](Request& r) { r.mutable_problem()->set_accumulate(static_cast<v1::Accumulate>(3)); },
       "problem.accumulate:", reason::kBadField},
      {"ScaleNan", [](Request& r) { r.mutable_problem()->set_scale(kNan); },
       "problem.scale: expected a finite number, got nan", reason::kBadField},
      {"ScaleInfinite", [](Request& r) { r.mutable_problem()->set_scale(kInfinity); },
       "problem.scale:", reason::kBadField},
      {"SoftcapNegative", [](Request& r) { r.mutable_problem()->set_softcap(-1); },
       "problem.softcap: expected 0 or above, got -1", reason::kBadField},
      {"SoftcapNan", [](Request& r) { r.mutable_problem()->set_softcap(kNan); },
       "problem.softcap:", reason::kBadField},
      {"AlignmentEmpty", [](Request& r) { r.mutable_problem()->mutable_alignment(); },
       "problem.alignment: expected one of", reason::kBadField},
      {"AlignmentTopLeftFalse",
       [](Request& r) { r.mutable_problem()->mutable_alignment()->set_top_left(false); },
       "problem.alignment.top_left: expected true", reason::kBadField},
      {"AlignmentBottomRightFalse",
       [](Request& r) { r.mutable_problem()->mutable_alignment()->set_bottom_right(false); },
       "problem.alignment.bottom_right: expected true", reason::kBadField},
      {"OffsetsNone",
       [](Request& r) { r.mutable_problem()->mutable_alignment()->mutable_offsets(); },
       "problem.alignment.offsets.offset: expected 1 or batch", reason::kBadShape},
      {"OffsetsTooMany",
       [](Request& r) {
         for (int n = 0; n < 3; ++n)
           r.mutable_problem()->mutable_alignment()->mutable_offsets()->add_offset(n);
       },
       "problem.alignment.offsets.offset: expected 1 or batch", reason::kBadShape},
      {"OffsetHuge",
       [](Request& r) {
         r.mutable_problem()->mutable_alignment()->mutable_offsets()->add_offset(-(1 << 20) - 1);
       },
       "problem.alignment.offsets.offset[0]:", reason::kBadShape},
      {"WindowBelowMinusOne",
       [](Request& r) { r.mutable_problem()->mutable_window()->set_left(-2); },
       "problem.window.left: expected -1..2147483647, got -2", reason::kBadField},
      {"WindowRightBelowMinusOne",
       [](Request& r) { r.mutable_problem()->mutable_window()->set_right(-9); },
       "problem.window.right:", reason::kBadField},
      {"KvLengthsWrongCount",
       [](Request& r) {
         r.mutable_problem()->mutable_lengths()->add_kv_len(3);
         r.mutable_problem()->mutable_lengths()->add_kv_len(3);
       },
       "problem.lengths.kv_len: expected batch = 1 entries, got 2", reason::kBadShape},
      {"KvLengthTooLong",
       [](Request& r) { r.mutable_problem()->mutable_lengths()->add_kv_len(17); },
       "problem.lengths.kv_len[0]: expected 0..16, got 17", reason::kBadShape},
      {"KvLengthNegative",
       [](Request& r) { r.mutable_problem()->mutable_lengths()->add_kv_len(1u << 31); },
       "problem.lengths.kv_len[0]: expected 0..1048576, got 2147483648", reason::kBadShape},
      {"KvLengthsInPackedLayout",
       [](Request& r) {
         SetPacked(*r.mutable_problem(), {0, 8, 16}, {0, 8, 16});
         r.mutable_problem()->mutable_lengths()->add_kv_len(3);
       },
       "problem.lengths.kv_len: expected none in a packed layout", reason::kBadShape},
      {"CuSeqlensInDenseLayout",
       [](Request& r) { r.mutable_problem()->mutable_lengths()->add_cu_seqlens_q(0); },
       "problem.lengths.cu_seqlens_q: expected none in a dense layout", reason::kBadShape},
      {"CuSeqlensAbsentInPackedLayout",
       [](Request& r) { r.mutable_problem()->set_layout(v1::LAYOUT_PACKED_THD); },
       "problem.lengths.cu_seqlens_q: expected batch + 1 = 2 entries, got 0", reason::kBadShape},
      {"CuSeqlensFirstNotZero",
       [](Request& r) {
         SetPacked(*r.mutable_problem(), {1, 8, 16}, {0, 8, 16});
       },
       "problem.lengths.cu_seqlens_q[0]: expected 0, got 1", reason::kBadShape},
      {"CuSeqlensFalling",
       [](Request& r) {
         SetPacked(*r.mutable_problem(), {0, 17, 16}, {0, 8, 16});
       },
       "problem.lengths.cu_seqlens_q[2]: expected at least 17, got 16", reason::kBadShape},
      {"CuSeqlensKFalling",
       [](Request& r) {
         SetPacked(*r.mutable_problem(), {0, 8, 16}, {0, 20, 16});
       },
       "problem.lengths.cu_seqlens_k[2]:", reason::kBadShape},
      {"CuSeqlensWrongTotal",
       [](Request& r) {
         SetPacked(*r.mutable_problem(), {0, 8, 15}, {0, 8, 16});
       },
       "problem.lengths.cu_seqlens_q[2]: expected the total length 16, got 15", reason::kBadShape},
      {"MaskVersionZero", [](Request& r) { r.mutable_problem()->mutable_mask(); },
       "problem.mask.version: expected 1, got 0", reason::kBadField},
      {"MaskBesideBoolMask",
       [](Request& r) {
         SetWindowMask(*r.mutable_problem());
         for (int n = 0; n < 4; ++n) r.mutable_problem()->mutable_bool_mask()->add_shape(1);
         r.set_mask_bits("x");
       },
       "problem.mask: expected one of mask and bool_mask, got both", reason::kBadField},
      {"MaskWindow", [](Request& r) { SetWindowMask(*r.mutable_problem())->set_left(-2); },
       "problem.mask.pattern[0].expr.window.left: expected ", reason::kBadField},
      {"MaskIdBesideAMask",
       [](Request& r) {
         SetWindowMask(*r.mutable_problem());
         r.mutable_problem()->mutable_mask()->set_id(std::string(32, 'x'));
       },
       "problem.mask.id: expected nothing but origin beside it", reason::kBadField},
      {"MaskIdTooShort", [](Request& r) { r.mutable_problem()->mutable_mask()->set_id("x"); },
       "problem.mask.id: expected 32 bytes, got 1 bytes", reason::kBadField},
      {"MaskIdUnknown",
       [](Request& r) { r.mutable_problem()->mutable_mask()->set_id(std::string(32, 'x')); },
       "problem.mask.id: not known", reason::kMaskUnknown, absl::StatusCode::kFailedPrecondition},
      {"MaskWithoutDiagonal",
       [](Request& r) {
         SetWindowMask(*r.mutable_problem());
         r.mutable_problem()->set_kv_len(8);
         const size_t bytes = r.k().size() / 2;
         r.mutable_k()->resize(bytes);
         r.mutable_v()->resize(bytes);
       },
       "problem.alignment: expected top_left, bottom_right or offsets, since the mask",
       reason::kBadField},
      {"MaskBesideAnotherFault",
       [](Request& r) {
         r.mutable_problem()->mutable_mask()->set_version(1);
         r.mutable_problem()->set_softcap(-1);
       },
       "problem.softcap: expected ", reason::kBadField},
      {"MaskAndBoolMask",
       [](Request& r) {
         r.mutable_problem()->mutable_mask()->set_version(1);
         r.mutable_problem()->mutable_bool_mask();
       },
       "problem.mask: expected one of mask and bool_mask, got both", reason::kBadField},
      {"BoolMaskWrongRank",
       [](Request& r) {
         for (int n = 0; n < 3; ++n) r.mutable_problem()->mutable_bool_mask()->add_shape(1);
       },
       "problem.bool_mask.shape: expected 4 entries, got 3", reason::kBadShape},
      {"BoolMaskWrongShape",
       [](Request& r) {
         for (int n : {1, 1, 15, 16})
           r.mutable_problem()->mutable_bool_mask()->add_shape(static_cast<uint32_t>(n));
       },
       "problem.bool_mask.shape[2]: expected 1 or 16, got 15", reason::kBadShape},
      {"BoolMaskZeroDimension",
       [](Request& r) {
         for (int n : {0, 1, 16, 16})
           r.mutable_problem()->mutable_bool_mask()->add_shape(static_cast<uint32_t>(n));
       },
       "problem.bool_mask.shape[0]: expected 1 or 1, got 0", reason::kBadShape},
      {"BoolMaskWithoutBits",
       [](Request& r) {
         for (int n : {1, 1, 16, 16})
           r.mutable_problem()->mutable_bool_mask()->add_shape(static_cast<uint32_t>(n));
       },
       "mask_bits: expected 32 bytes, got 0 bytes", reason::kSizeMismatch},
      {"BitsWithoutBoolMask", [](Request& r) { r.set_mask_bits("x"); },
       "mask_bits: expected none without problem.bool_mask, got 1 bytes", reason::kSizeMismatch},
      {"BiasWrongRank",
       [](Request& r) { r.mutable_problem()->mutable_bias()->set_element(v1::ELEMENT_FLOAT32); },
       "problem.bias.shape: expected 4 entries, got 0", reason::kBadShape},
      {"BiasElementUnspecified",
       [](Request& r) {
         for (int n = 0; n < 4; ++n) r.mutable_problem()->mutable_bias()->add_shape(1);
       },
       "problem.bias.element:", reason::kBadDtype},
      {"BiasWithoutPayload",
       [](Request& r) {
         for (int n = 0; n < 4; ++n) r.mutable_problem()->mutable_bias()->add_shape(1);
         r.mutable_problem()->mutable_bias()->set_element(v1::ELEMENT_FLOAT16);
       },
       "bias: expected 2 bytes, got 0 bytes", reason::kSizeMismatch},
      {"PayloadWithoutBias", [](Request& r) { r.set_bias("1234"); },
       "bias: expected none without problem.bias, got 4 bytes", reason::kSizeMismatch},
      {"AlibiEmpty", [](Request& r) { r.mutable_problem()->mutable_alibi(); },
       "problem.alibi.slope:", reason::kBadShape},
      {"AlibiWrongCount",
       [](Request& r) {
         for (int n = 0; n < 3; ++n) r.mutable_problem()->mutable_alibi()->add_slope(1);
       },
       "problem.alibi.slope: expected q_heads = 2", reason::kBadShape},
      {"AlibiNan",
       [](Request& r) {
         for (int n = 0; n < 2; ++n) r.mutable_problem()->mutable_alibi()->add_slope(kNan);
       },
       "problem.alibi.slope[0]: expected a finite number", reason::kBadField},
      {"DropoutOne", [](Request& r) { r.mutable_problem()->mutable_dropout()->set_p(1); },
       "problem.dropout.p:", reason::kBadField},
      {"DropoutAboveOne", [](Request& r) { r.mutable_problem()->mutable_dropout()->set_p(1e30f); },
       "problem.dropout.p:", reason::kBadField},
      {"DropoutRoundsToOne",
       [](Request& r) { r.mutable_problem()->mutable_dropout()->set_p(0.9985f); },
       "problem.dropout.p:", reason::kBadField},
      {"DropoutNegative", [](Request& r) { r.mutable_problem()->mutable_dropout()->set_p(-0.01f); },
       "problem.dropout.p:", reason::kBadField},
      {"DropoutNan", [](Request& r) { r.mutable_problem()->mutable_dropout()->set_p(kNan); },
       "problem.dropout.p:", reason::kBadField},
      {"DenominatorEmpty", [](Request& r) { r.mutable_problem()->mutable_denominator(); },
       "problem.denominator: expected one of", reason::kBadField},
      {"SinkWrongCount",
       [](Request& r) { r.mutable_problem()->mutable_denominator()->mutable_sink()->add_logit(0); },
       "problem.denominator.sink.logit: expected q_heads = 2 entries, got 1", reason::kBadShape},
      {"SinkNan",
       [](Request& r) {
         for (int n = 0; n < 2; ++n)
           r.mutable_problem()->mutable_denominator()->mutable_sink()->add_logit(kNan);
       },
       "problem.denominator.sink.logit[0]:", reason::kBadField},
      {"ShardHeadOffsetHuge",
       [](Request& r) { r.mutable_problem()->mutable_shard()->set_q_head_offset(65537); },
       "problem.shard.q_head_offset:", reason::kBadShape},
      {"ShardTotalTooSmall",
       [](Request& r) { r.mutable_problem()->mutable_shard()->set_total_q_heads(1); },
       "problem.shard.total_q_heads:", reason::kBadShape},
      {"QOneByteShort", [](Request& r) { r.mutable_q()->pop_back(); },
       "q: expected 1024 bytes, got 1023 bytes", reason::kSizeMismatch},
      {"QOneByteLong", [](Request& r) { r.mutable_q()->push_back('x'); },
       "q: expected 1024 bytes, got 1025 bytes", reason::kSizeMismatch},
      {"KOneByteShort", [](Request& r) { r.mutable_k()->pop_back(); },
       "k: expected 1024 bytes, got 1023 bytes", reason::kSizeMismatch},
      {"VOneByteLong", [](Request& r) { r.mutable_v()->push_back('x'); },
       "v: expected 1024 bytes, got 1025 bytes", reason::kSizeMismatch},
      {"QAbsent", [](Request& r) { r.clear_q(); }, "q: expected 1024 bytes, got 0 bytes",
       reason::kSizeMismatch},
      {"CausalWithoutAlignment",
       [](Request& r) {
         r.mutable_problem()->set_kv_len(8);
         r.mutable_problem()->set_causal(true);
       },
       "problem.alignment: expected top_left, bottom_right or offsets", reason::kBadField},
      {"PriorityUnknown",
       [](Request& r) { r.mutable_options()->set_priority(static_cast<v1::Priority>(4)); },
       "options.priority: expected PRIORITY_LOW, PRIORITY_NORMAL or PRIORITY_HIGH, got 4",
       reason::kBadField},
      {"RequestIdTooLong",
       [](Request& r) { r.mutable_options()->set_request_id(std::string(65, 'x')); },
       "options.request_id: expected at most 64 bytes, got 65", reason::kBadField},
  };
  return cases;
}

class DecodeBadForward : public testing::TestWithParam<size_t> {};

TEST_P(DecodeBadForward, NamesTheField) {
  const BadForward& bad = BadForwards()[GetParam()];
  v1::ForwardRequest request = Valid();
  bad.spoil(request);
  absl::Status status = DecodeText(request.SerializeAsString()).status();
  EXPECT_EQ(status.code(), bad.code) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), bad.message)) << status;
  EXPECT_EQ(ReasonOf(status), bad.reason) << status;
}

INSTANTIATE_TEST_SUITE_P(All, DecodeBadForward, testing::Range<size_t>(0, BadForwards().size()),
                         [](const auto& info) { return BadForwards()[info.param].name; });

TEST(Decode, NamesTheTensorWhenABackwardPayloadIsOneByteOff) {
  struct Payload {
    const char* name;
    std::function<std::string*(v1::BackwardRequest&)> field;
  };
  const Payload payloads[] = {
      {"q", [](v1::BackwardRequest& r) { return r.mutable_q(); }},
      {"k", [](v1::BackwardRequest& r) { return r.mutable_k(); }},
      {"v", [](v1::BackwardRequest& r) { return r.mutable_v(); }},
      {"o", [](v1::BackwardRequest& r) { return r.mutable_o(); }},
      {"lse", [](v1::BackwardRequest& r) { return r.mutable_lse(); }},
      {"d_o", [](v1::BackwardRequest& r) { return r.mutable_d_o(); }},
      {"d_lse", [](v1::BackwardRequest& r) { return r.mutable_d_lse(); }},
  };
  for (const Payload& payload : payloads) {
    for (bool longer : {false, true}) {
      v1::BackwardRequest request = ValidBackward();
      std::string* bytes = payload.field(request);
      longer ? bytes->push_back('x') : bytes->pop_back();
      absl::Status status = DecodeText(request.SerializeAsString(), Direction::kBackward).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << payload.name;
      EXPECT_TRUE(absl::StartsWith(status.message(), absl::StrCat(payload.name, ": expected ")))
          << status;
      EXPECT_EQ(ReasonOf(status), reason::kSizeMismatch);
    }
  }
}

TEST(Decode, PassesOnTheWishToKeepAResidual) {
  v1::ForwardRequest request = Valid();
  request.mutable_options()->set_keep_residual(true);
  request.mutable_options()->set_residual_ttl_ms(1500);
  absl::StatusOr<AttentionCall> call = DecodeText(request.SerializeAsString());
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_TRUE(call->keep_residual());
  EXPECT_EQ(call->residual_ttl(), absl::Milliseconds(1500));
}

TEST(Decode, RefusesTheWishToKeepABackward) {
  v1::BackwardRequest request = ValidBackward();
  request.mutable_options()->set_keep_residual(true);
  absl::Status status = DecodeText(request.SerializeAsString(), Direction::kBackward).status();
  EXPECT_EQ(status.message(), "options.keep_residual: expected false in Backward, got true");
}

// With a token the gradient of o comes alone.
v1::BackwardRequest Leased() {
  v1::BackwardRequest request = ValidBackward();
  for (std::string* bytes :
       {request.mutable_q(), request.mutable_k(), request.mutable_v(), request.mutable_o(),
        request.mutable_lse(), request.mutable_mask_bits(), request.mutable_bias()}) {
    bytes->clear();
  }
  request.set_residual_token(std::string("to\0ken", 6));
  return request;
}

TEST(Decode, ReadsTheGradientsAloneBesideAToken) {
  for (bool with_d_lse : {false, true}) {
    v1::BackwardRequest request = Leased();
    if (!with_d_lse) request.clear_d_lse();
    absl::StatusOr<AttentionCall> call =
        DecodeText(request.SerializeAsString(), Direction::kBackward);
    ASSERT_TRUE(call.ok()) << call.status();
    EXPECT_EQ(call->residual_token(), std::string("to\0ken", 6));
    const std::vector<int> inputs = {Tensor::kDO, Tensor::kDLse};
    EXPECT_EQ(IdsOf(*call, TensorUse::kInput), with_d_lse ? inputs : std::vector<int>{Tensor::kDO});
    EXPECT_EQ(IdsOf(*call, TensorUse::kKept),
              (std::vector<int>{Tensor::kK, Tensor::kV, Tensor::kQ, Tensor::kLse, Tensor::kO}));
    EXPECT_EQ(call->input_bytes(), request.d_o().size() + request.d_lse().size());
  }
}

TEST(Decode, RefusesSharedMemoryInAStreamedCall) {
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  for (std::string* payload : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    payload->clear();
  }
  request.mutable_shared_memory()->add_region("token");
  const MessageBytes message(InSlicesOf(request.SerializeAsString(), 100));
  auto call = Decoder::DecodeHeader(message, {0, message.size()}, Direction::kForward,
                                    {Masks(), "caller"}, AnyRoom);
  EXPECT_EQ(call.status().message(), "shared_memory: expected none in a streamed call, got some");
}

// Which would be another gradient without it.
TEST(Decode, RefusesAnnouncedGradientsThatCannotFollow) {
  v1::BackwardRequest request = Leased();
  request.set_d_lse_follows(true);
  EXPECT_EQ(DecodeText(request.SerializeAsString(), Direction::kBackward).status().message(),
            "d_lse_follows: expected false in a unary call, got true");
}

TEST(Decode, TakesTheSumsElementFromTheProblem) {
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  request.mutable_problem()->set_accumulate(v1::ACCUMULATE_FLOAT16);
  absl::StatusOr<AttentionCall> call = DecodeText(request.SerializeAsString(), Direction::kForward);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->problem().accumulate, AccumulateType::kFloat16);
}

TEST(Decode, RefusesOtherTensorsBesideAToken) {
  v1::BackwardRequest request = Leased();
  request.set_k(ValidBackward().k());
  absl::Status status = DecodeText(request.SerializeAsString(), Direction::kBackward).status();
  EXPECT_TRUE(absl::StartsWith(status.message(), "k: expected none beside residual_token, got "))
      << status;
  EXPECT_EQ(ReasonOf(status), reason::kSizeMismatch);
  request = Leased();
  request.clear_d_o();
  status = DecodeText(request.SerializeAsString(), Direction::kBackward).status();
  EXPECT_TRUE(absl::StartsWith(status.message(), "d_o: expected ")) << status;
}

TEST(Decode, RefusesATokenThatIsTooLong) {
  v1::BackwardRequest request = Leased();
  request.set_residual_token(std::string(256, 't'));
  EXPECT_TRUE(DecodeText(request.SerializeAsString(), Direction::kBackward).ok());
  request.set_residual_token(std::string(257, 't'));
  absl::Status status = DecodeText(request.SerializeAsString(), Direction::kBackward).status();
  EXPECT_EQ(status.message(), "residual_token: expected at most 256 bytes, got 257");
}

// ---- Masks by description.

std::string MaskIdOf(const AttentionCall& call) {
  return {call.problem().mask->id().begin(), call.problem().mask->id().end()};
}

TEST(Decode, AMaskIsKeptForItsCallerAndFoundByItsId) {
  v1::ForwardRequest request = Valid();
  SetWindowMask(*request.mutable_problem());
  const std::string whole = request.SerializeAsString();
  absl::StatusOr<AttentionCall> first = DecodeText(whole);
  ASSERT_TRUE(first.ok()) << first.status();
  v1::MaskSpec& mask = *request.mutable_problem()->mutable_mask();
  mask.Clear();
  mask.set_id(MaskIdOf(*first));
  mask.mutable_origin()->set_row_begin(0);
  absl::StatusOr<AttentionCall> second = DecodeText(request.SerializeAsString());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->problem().mask, first->problem().mask);
  const uint64_t hits = Masks().stats().hits;
  absl::StatusOr<AttentionCall> third = DecodeText(request.SerializeAsString());
  ASSERT_TRUE(third.ok()) << third.status();  // the same bytes again
  EXPECT_EQ(third->problem().mask, first->problem().mask);
  EXPECT_EQ(Masks().stats().hits, hits + 1);
  EXPECT_GT(third->mask_bytes(), 0);
  // The same bytes, right after, from somebody else.
  const auto other = [](const std::string& bytes) {
    return DecodeText(bytes, Direction::kForward, 1 << 16, "other").status();
  };
  EXPECT_EQ(ReasonOf(other(request.SerializeAsString())), reason::kMaskUnknown);
  EXPECT_TRUE(DecodeText(whole).ok());
  EXPECT_TRUE(other(whole).ok());
  EXPECT_TRUE(other(request.SerializeAsString()).ok());
}

TEST(Decode, AMaskHasItsPlaceFromTheOrigin) {
  v1::ForwardRequest request = Valid();
  SetWindowMask(*request.mutable_problem());
  v1::MaskSpec& mask = *request.mutable_problem()->mutable_mask();
  mask.mutable_extents()->set_rows(1000);
  mask.mutable_extents()->set_keys(1000);
  mask.mutable_origin()->set_row_begin(500);
  mask.mutable_origin()->set_key_begin(500);
  absl::StatusOr<AttentionCall> call = DecodeText(request.SerializeAsString());
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->problem().mask_origin, (MaskOrigin{.row_begin = 500, .key_begin = 500}));
  mask.mutable_origin()->set_row_begin(999);
  absl::Status outside = DecodeText(request.SerializeAsString()).status();
  EXPECT_TRUE(absl::StartsWith(outside.message(), "problem.mask.extents.rows")) << outside;
}

TEST(Decode, ARowWithoutKeysIsAnErrorWhereTheMaskSaysSo) {
  v1::ForwardRequest request = Valid();
  v1::RelativeWindow& window = *SetWindowMask(*request.mutable_problem());
  window.set_left(0);
  v1::MaskSpec& mask = *request.mutable_problem()->mutable_mask();
  v1::Expr diagonal = mask.pattern(0).expr();
  *mask.mutable_pattern(0)->mutable_expr()->mutable_negate() = diagonal;
  EXPECT_TRUE(DecodeText(request.SerializeAsString()).ok());
  request.mutable_problem()->set_causal(true);  // the first row sees its own key at most
  EXPECT_TRUE(DecodeText(request.SerializeAsString()).ok());
  mask.set_empty_row(v1::EMPTY_ROW_REJECT);
  absl::Status empty = DecodeText(request.SerializeAsString()).status();
  EXPECT_EQ(empty.code(), absl::StatusCode::kInvalidArgument) << empty;
  EXPECT_EQ(ReasonOf(empty), reason::kEmptyRow) << empty;
}

// ---- Everything wrong that only bytes can say.

struct BadBytes {
  const char* name;
  std::string bytes;
  const char* message;
};

std::vector<BadBytes> BadByteCases() {
  std::string valid = Valid().SerializeAsString();
  std::string deep;  // problem.mask.pattern.expr.negate.negate...
  for (int n = 0; n < 80; ++n) deep = BytesField(13, deep);
  std::string patterns;
  for (int n = 0; n <= kMaxNodes; ++n) patterns += BytesField(4, "");
  return {
      {"DuplicatedProblem", valid + BytesField(1, Valid().problem().SerializeAsString()),
       "problem: expected at most one value, got two"},
      {"DuplicatedPayload", valid + BytesField(20, Valid().k()), "k: expected at most one value"},
      {"DuplicatedBool", valid + VarintField(3, 1), "want_lse: expected at most one value"},
      {"DuplicatedScalar", WithProblemBytes(VarintField(4, 16)),
       "problem.q_len: expected at most one value"},
      {"DuplicatedSubMessage", WithProblemBytes(BytesField(19, "") + BytesField(19, "")),
       "problem.dropout: expected at most one value"},
      {"TwoMembersOfOneof", WithProblemBytes(BytesField(12, VarintField(1, 1) + VarintField(2, 1))),
       "problem.alignment: expected one member of kind, got two"},
      {"UnknownTopLevelField", valid + VarintField(30, 1),
       "field_30: expected a field of attnd.v1.ForwardRequest"},
      {"UnknownProblemField", WithProblemBytes(VarintField(99, 1)),
       "problem.field_99: expected a field of attnd.v1.Problem"},
      {"BackwardsFieldInForward", valid + BytesField(25, "x"), "field_25: expected a field"},
      {"ReservedField", WithProblemBytes(BytesField(18, BytesField(2, "x"))),
       "problem.alibi.field_2: expected a field"},
      {"WrongWireType", WithProblemBytes(Tag(19, 0) + Varint(1)),
       "problem.dropout: expected wire type length-delimited, got varint"},
      {"PayloadAsVarint", VarintField(22, 5) + valid,
       "q: expected wire type length-delimited, got varint"},
      {"Group", valid + Tag(22, 3), "q: expected "},
      {"EndGroup", valid + Tag(22, 4), "q: expected "},
      {"FieldNumberZero", valid + std::string(1, '\0'), "message: expected a field's tag"},
      {"TrailingGarbage", valid + "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
       "message: expected a field's tag"},
      {"TruncatedPayload", valid.substr(0, valid.size() - 1), "bytes, got "},
      {"TruncatedAtTag", Tag(1, 2), "problem: expected a length, got truncated bytes"},
      {"TruncatedVarint", Tag(3, 0) + "\x80", "want_lse: expected a varint"},
      {"LengthBeyondMessage", Tag(22, 2) + Varint(1u << 30), "q: expected 1073741824 bytes"},
      {"LengthBeyond31Bits", Tag(22, 2) + Varint(uint64_t{1} << 31),
       "q: expected 2147483648 bytes, got 0"},
      {"LengthBeyond32Bits", Tag(22, 2) + Varint((uint64_t{1} << 32) + 1) + "x",
       "q: expected 4294967297 bytes, got 1"},
      {"LengthBeyond63Bits", Tag(22, 2) + Varint(~uint64_t{0}),
       "q: expected 18446744073709551615 bytes, got 0"},
      {"NestedLengthBeyondParent", BytesField(1, Tag(12, 2) + Varint(100)),
       "problem.alignment: expected 100 bytes, got 0"},
      {"NumberTooWide", BytesField(1, VarintField(4, (uint64_t{1} << 32) + 16)),
       "problem.q_len: expected a number of 32 bits, got 4294967312"},
      {"NumberTwoTo63", BytesField(1, VarintField(1, uint64_t{1} << 63)),
       "problem.batch: expected a number of 32 bits"},
      {"BoolTwo", VarintField(3, 2), "want_lse: expected 0 or 1, got 2"},
      {"PackedFixed32Ragged", WithProblemBytes(BytesField(18, BytesField(1, "12345"))),
       "problem.alibi.slope: expected a multiple of 4 bytes, got 5"},
      {"PackedVarintTruncated", WithProblemBytes(BytesField(15, BytesField(1, "\x80"))),
       "problem.lengths.kv_len: expected a varint"},
      {"NestedTooDeep", WithProblemBytes(BytesField(16, BytesField(4, BytesField(1, deep)))),
       "levels of nesting"},
      {"TooManyNodes", WithProblemBytes(BytesField(16, patterns)),
       "expected at most 131072 messages and strings inside one, got more"},
      {"InvalidUtf8", valid + BytesField(2, BytesField(1, "\xff\xfe")),
       "options: expected a protobuf message with UTF-8"},
      {"Empty", "", "problem: expected a problem, got none"},
  };
}

TEST(Decode, NamesWhatIsWrongWhenBytesAreMalformed) {
  for (const BadBytes& bad : BadByteCases()) {
    for (size_t slice_bytes : {size_t{1}, size_t{7}, size_t{1} << 16}) {
      absl::Status status = DecodeText(bad.bytes, Direction::kForward, slice_bytes).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.name << ": " << status;
      EXPECT_TRUE(absl::StrContains(status.message(), bad.message)) << bad.name << ": " << status;
      EXPECT_FALSE(ReasonOf(status).empty()) << bad.name;
    }
  }
}

TEST(Decode, GivesAStatusForEveryPrefixAndEveryFlippedByteOfAHeader) {
  v1::ForwardRequest request = MakeForward(SmallProblem(2, 1), 3);
  request.mutable_problem()->mutable_alignment()->set_top_left(true);
  request.mutable_problem()->mutable_dropout()->set_p(0.1f);
  std::string message = request.SerializeAsString();
  for (size_t length = 0; length < message.size(); ++length) {
    EXPECT_FALSE(DecodeText(message.substr(0, length)).ok()) << length;
  }
  for (size_t at = 0; at < message.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = message;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      absl::Status status = DecodeText(flipped).status();
      EXPECT_TRUE(status.ok() || !ReasonOf(status).empty()) << at << " " << status;
    }
  }
}

// Each is decoded first, again, after the other, and in small slices.
TEST(Decode, GivesAProblemAgainHoweverItWasSeenBefore) {
  v1::ForwardRequest causal = MakeForward(SmallProblem(), 3), windowed = causal;
  causal.mutable_problem()->set_causal(true);
  causal.mutable_options()->set_priority(v1::PRIORITY_HIGH);
  windowed.mutable_problem()->mutable_window()->set_left(5);
  windowed.mutable_problem()->mutable_window()->set_right(0);
  const std::string messages[] = {causal.SerializeAsString(), windowed.SerializeAsString()};
  for (int which : {0, 0, 1, 0, 1, 1, 0}) {
    for (size_t slice_bytes : {size_t{1} << 16, size_t{1} << 16, size_t{5}}) {
      absl::StatusOr<AttentionCall> call =
          DecodeText(messages[which], Direction::kForward, slice_bytes);
      ASSERT_TRUE(call.ok()) << call.status();
      EXPECT_EQ(call->problem().causal, which == 0);
      EXPECT_EQ(call->problem().window_left, which == 0 ? -1 : 5);
      EXPECT_EQ(call->problem().q_len, SmallProblem().q_len);
      EXPECT_EQ(call->priority(), which == 0 ? Priority::kHigh : Priority::kNormal);
      EXPECT_EQ(PayloadOf(*call, Tensor::kQ), (which == 0 ? causal : windowed).q());
    }
  }
}

// The rest of a message is checked although its problem was seen before.
TEST(Decode, RefusesTheRestOfAMessageWhoseProblemIsKnown) {
  const std::string good = Valid().SerializeAsString();
  ASSERT_TRUE(DecodeText(good).ok());
  EXPECT_FALSE(DecodeText(good + VarintField(30, 1)).ok());
  EXPECT_FALSE(DecodeText(good + BytesField(1, Valid().problem().SerializeAsString())).ok());
  EXPECT_FALSE(DecodeText(good.substr(0, good.size() - 1)).ok());
  EXPECT_TRUE(DecodeText(good).ok());
}

// On a thread that has seen no problem yet, where "none" must not pass for one of no bytes.
TEST(Decode, RefusesAProblemOfNoBytesAsAThreadsFirst) {
  v1::ForwardRequest request = Valid();
  request.mutable_problem()->Clear();
  for (const std::string& message : {BytesField(1, ""), request.SerializeAsString()}) {
    std::thread([&] {
      absl::StatusOr<AttentionCall> call = DecodeText(message);
      ASSERT_FALSE(call.ok());
      EXPECT_TRUE(absl::StrContains(call.status().message(), "problem.element")) << call.status();
    }).join();
  }
}

TEST(Decode, RefusesLongListsBeforeTheyAreParsed) {
  std::string zeros(size_t{1} << 23, '\0');
  absl::Status status = DecodeText(WithProblemBytes(BytesField(15, BytesField(1, zeros)))).status();
  EXPECT_TRUE(
      absl::StrContains(status.message(), "problem.lengths.kv_len: expected at most 2097154"))
      << status;
}

}  // namespace
}  // namespace attnd
