#include "proto/attnd/v1/wire_writer.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "proto/attnd/v1/attention.pb.h"

namespace attnd {
namespace {

// The longest text's message has a length of two bytes, and the receipt around it one of three.
v1::Receipt ReceiptWith(size_t text_bytes) {
  v1::Receipt receipt;
  receipt.set_backend("cpu");
  receipt.set_kernel(std::string(text_bytes, 'k'));
  receipt.set_dropout_p_effective(0.25f);
  receipt.set_batched_with(300);
  for (uint64_t nanoseconds : {uint64_t{0}, uint64_t{127}, std::numeric_limits<uint64_t>::max()}) {
    v1::Stage* stage = receipt.add_stage();
    stage->set_name(std::string(text_bytes, 's'));
    stage->set_nanoseconds(nanoseconds);
  }
  receipt.set_deterministic(true);
  return receipt;
}

void Write(const v1::Receipt& receipt, WireWriter& out) {
  out.Text(v1::Receipt::kBackendFieldNumber, receipt.backend());
  out.Text(v1::Receipt::kDeviceFieldNumber, receipt.device());
  out.Text(v1::Receipt::kKernelFieldNumber, receipt.kernel());
  out.Number(v1::Receipt::kAccumulateFieldNumber, receipt.accumulate());
  out.Float(v1::Receipt::kDropoutPEffectiveFieldNumber, receipt.dropout_p_effective());
  out.Number(v1::Receipt::kBatchedWithFieldNumber, receipt.batched_with());
  for (const v1::Stage& stage : receipt.stage()) {
    out.Message(v1::Receipt::kStageFieldNumber, [&] {
      out.Text(v1::Stage::kNameFieldNumber, stage.name());
      out.Number(v1::Stage::kNanosecondsFieldNumber, stage.nanoseconds());
    });
  }
  out.Number(v1::Receipt::kDeterministicFieldNumber, receipt.deterministic() ? 1 : 0);
}

TEST(WireWriter, GivesTheBytesOfTheGeneratedMessage) {
  for (size_t text_bytes : {0, 1, 100, 127, 128, 20000}) {
    v1::ForwardResponse expected;
    *expected.mutable_receipt() = ReceiptWith(text_bytes);
    expected.set_o("payload");
    std::string got = "before";
    WireWriter out(got);
    out.Length(v1::ForwardResponse::kOFieldNumber, expected.o().size());
    got += expected.o();
    out.Message(v1::ForwardResponse::kReceiptFieldNumber, [&] { Write(expected.receipt(), out); });
    v1::ForwardResponse parsed;
    ASSERT_TRUE(parsed.ParseFromString(got.substr(6))) << text_bytes;
    EXPECT_EQ(parsed.SerializeAsString(), expected.SerializeAsString()) << text_bytes;
    // No byte more: what proto3 leaves out is left out, and lengths are as short as they can be.
    EXPECT_EQ(got.size(), 6 + expected.ByteSizeLong()) << text_bytes;
  }
}

}  // namespace
}  // namespace attnd
