#include "client/shards/shard_receipt.h"

#include <bit>
#include <cstdint>

#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/wire_format.h"

namespace attnd {
namespace {

using google::protobuf::io::CodedInputStream;
using v1::Receipt;
using v1::Stage;

constexpr uint32_t Bytes(int field) { return WireTag(field, WireType::kLengthDelimited); }
constexpr uint32_t Varint(int field) { return WireTag(field, WireType::kVarint); }
constexpr uint32_t Fixed32(int field) { return WireTag(field, WireType::kFixed32); }

bool ReadText(CodedInputStream& in, std::string& text) {
  int size;
  return in.ReadVarintSizeAsInt(&size) && in.ReadString(&text, size);
}

bool ReadFloat(CodedInputStream& in, float& value) {
  uint32_t bits;
  if (!in.ReadLittleEndian32(&bits)) return false;
  value = std::bit_cast<float>(bits);
  return true;
}

bool ReadStage(CodedInputStream& in, ShardReceipt::Stage& stage) {
  while (uint32_t tag = in.ReadTag()) {
    uint64_t nanoseconds = 0;
    if (tag == Bytes(Stage::kNameFieldNumber)) {
      if (!ReadText(in, stage.name)) return false;
    } else if (tag == Varint(Stage::kNanosecondsFieldNumber)) {
      if (!in.ReadVarint64(&nanoseconds)) return false;
      stage.duration = absl::Nanoseconds(nanoseconds);
    } else if (!SkipValue(in, tag)) {
      return false;
    }
  }
  return in.ConsumedEntireMessage();
}

bool ReadStages(CodedInputStream& in, ShardReceipt& receipt) {
  int size;
  if (!in.ReadVarintSizeAsInt(&size) || size > in.BytesUntilLimit()) return false;
  CodedInputStream::Limit outer = in.PushLimit(size);
  if (!ReadStage(in, receipt.stages.emplace_back())) return false;
  in.PopLimit(outer);
  return true;
}

bool ReadField(CodedInputStream& in, uint32_t tag, ShardReceipt& receipt) {
  uint64_t number = 0;
  switch (tag) {
    case Bytes(Receipt::kBackendFieldNumber):
      return ReadText(in, receipt.backend);
    case Bytes(Receipt::kDeviceFieldNumber):
      return ReadText(in, receipt.device);
    case Bytes(Receipt::kKernelFieldNumber):
      return ReadText(in, receipt.kernel);
    case Fixed32(Receipt::kDropoutPEffectiveFieldNumber):
      return ReadFloat(in, receipt.dropout_p_effective);
    case Bytes(Receipt::kStageFieldNumber):
      return ReadStages(in, receipt);
    case Varint(Receipt::kAccumulateFieldNumber):
      if (!in.ReadVarint64(&number)) return false;
      receipt.float16 = number == v1::ACCUMULATE_FLOAT16;
      return true;
    case Varint(Receipt::kDeterministicFieldNumber):
      if (!in.ReadVarint64(&number)) return false;
      receipt.deterministic = number != 0;
      return true;
    default:
      return SkipValue(in, tag);
  }
}

}  // namespace

bool ReadReceipt(CodedInputStream& in, ShardReceipt& receipt) {
  while (uint32_t tag = in.ReadTag()) {
    if (!ReadField(in, tag, receipt)) return false;
  }
  return in.ConsumedEntireMessage();
}

}  // namespace attnd
