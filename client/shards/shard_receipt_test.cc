#include "client/shards/shard_receipt.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include <string>

#include "proto/attnd/v1/attention.pb.h"

namespace attnd {
namespace {

using google::protobuf::io::ArrayInputStream;
using google::protobuf::io::CodedInputStream;

v1::Receipt Sent() {
  v1::Receipt receipt;
  receipt.set_backend("cpu");
  receipt.set_device("a processor whose name is longer than a short string");
  receipt.set_kernel("cpu_forward_f32");
  receipt.set_accumulate(v1::ACCUMULATE_FLOAT16);
  receipt.set_dropout_p_effective(0.25f);
  receipt.set_batched_with(3);
  receipt.set_deterministic(true);
  for (const char* name : {"receive", "queue", "h2d", "kernel", "d2h", "send", "another"}) {
    v1::Stage* stage = receipt.add_stage();
    stage->set_name(name);
    stage->set_nanoseconds(uint64_t{1} << (5 * receipt.stage_size()));
  }
  return receipt;
}

// From slices of `slice_bytes`.
bool Read(const std::string& bytes, int slice_bytes, ShardReceipt& receipt) {
  ArrayInputStream slices(bytes.data(), static_cast<int>(bytes.size()), slice_bytes);
  CodedInputStream in(&slices);
  in.PushLimit(static_cast<int>(bytes.size()));
  return ReadReceipt(in, receipt);
}

void ExpectEqual(const ShardReceipt& got, const v1::Receipt& sent) {
  EXPECT_EQ(got.backend, sent.backend());
  EXPECT_EQ(got.device, sent.device());
  EXPECT_EQ(got.kernel, sent.kernel());
  EXPECT_EQ(got.float16, sent.accumulate() == v1::ACCUMULATE_FLOAT16);
  EXPECT_EQ(got.dropout_p_effective, sent.dropout_p_effective());
  EXPECT_EQ(got.deterministic, sent.deterministic());
  ASSERT_EQ(got.stages.size(), sent.stage_size());
  for (int n = 0; n < sent.stage_size(); ++n) {
    EXPECT_EQ(got.stages[n].name, sent.stage(n).name());
    EXPECT_EQ(got.stages[n].duration, absl::Nanoseconds(sent.stage(n).nanoseconds()));
  }
}

TEST(ReadReceipt, ReadsWhatTheGeneratedMessageHolds) {
  for (int slice_bytes : {1, 2, 7, 1000}) {
    ShardReceipt receipt, empty;
    ASSERT_TRUE(Read(Sent().SerializeAsString(), slice_bytes, receipt)) << slice_bytes;
    ExpectEqual(receipt, Sent());
    ASSERT_TRUE(Read("", slice_bytes, empty));
    ExpectEqual(empty, v1::Receipt());
  }
}

TEST(ReadReceipt, SkipsFieldsThatItDoesNotKnow) {
  std::string bytes = Sent().SerializeAsString();
  bytes +=  // fields 20, a text, and 21, a number
      std::string("\xa2\x01\x03", 3) + "new" + std::string("\xa8\x01\x07", 3);
  ShardReceipt receipt;
  ASSERT_TRUE(Read(bytes, 5, receipt));
  ExpectEqual(receipt, Sent());
}

TEST(ReadReceipt, RefusesWhatTheGeneratedMessageRefusesAtEachLength) {
  const std::string whole = Sent().SerializeAsString();
  for (size_t bytes = 0; bytes <= whole.size(); ++bytes) {
    v1::Receipt expected;
    const bool good = expected.ParseFromString(whole.substr(0, bytes));
    ShardReceipt receipt;
    ASSERT_EQ(Read(whole.substr(0, bytes), 3, receipt), good) << bytes;
    if (good) ExpectEqual(receipt, expected);
  }
}

TEST(ReadReceipt, RefusesAStageThatReachesBeyondIt) {
  ShardReceipt receipt;
  EXPECT_FALSE(Read(std::string("\x3a\x09\x0a\x03", 4) + "abc", 100, receipt));
  EXPECT_TRUE(Read(std::string("\x3a\x05\x0a\x03", 4) + "abc", 100, receipt));
}

}  // namespace
}  // namespace attnd
