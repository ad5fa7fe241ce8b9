#include "client/c/capture.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <variant>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "attention/patterns/attention_map.h"
#include "base/status_macros.h"
#include "client/c/conversions.h"
#include "client/c/handles.h"
#include "proto/attnd/v1/mask_codec.h"
#include "proto/attnd/v1/pattern_codec.h"

namespace attnd {
namespace {

absl::StatusOr<BlockList> BlocksOf(const v1::BuildPatternResponse& reply) {
  v1::MaskSpec wire;
  wire.set_version(1);
  *wire.add_pattern()->mutable_blocks() = reply.blocks();
  ASSIGN_OR_RETURN(MaskSpec mask, DecodeMask(wire));
  return std::get<BlockList>(std::move(mask.pattern[0]));
}

}  // namespace

absl::StatusOr<KeptAttentionMap> ToKeptMap(absl::string_view field, const char* text) {
  KeptAttentionMap kept;
  if (text == nullptr || *text == '\0') return kept;
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  const bool hexadecimal =
      parts.second.size() % 2 == 0 &&
      parts.second.find_first_not_of("0123456789abcdefABCDEF") == absl::string_view::npos;
  if (!absl::SimpleAtoi(parts.first, &kept.address) || kept.address < 0 || !hexadecimal ||
      parts.second.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": expected a token of a capture, got another text"));
  }
  kept.token = absl::HexStringToBytes(parts.second);
  return kept;
}

absl::StatusOr<CaptureOptions> ToCaptureOptions(const attnd_capture& from) {
  const attnd_capture full = FullStructure(from);
  RETURN_IF_ERROR(CheckHasSize("capture", from));
  if (full.pooled == nullptr) {
    return absl::InvalidArgumentError("capture.pooled: expected an array, got a null pointer");
  }
  CaptureOptions options{.block = full.block, .keep = full.keep != 0, .previous = {}};
  ASSIGN_OR_RETURN(options.previous, ToKeptMap("capture.previous", full.previous));
  return options;
}

absl::Status GivePooled(const Problem& problem, const attnd_capture& to,
                        const CapturedAttention& captured) {
  const MapShape shape = {problem.q_len, problem.kv_len, to.block};
  const int64_t expected = shape.row_blocks() * shape.key_blocks();
  if (static_cast<int64_t>(captured.pooled.size()) != expected) {
    return absl::DataLossError(absl::StrCat("reply.captured.pooled: expected ", expected,
                                            " averages, got ", captured.pooled.size()));
  }
  std::copy(captured.pooled.begin(), captured.pooled.end(), to.pooled);
  return absl::OkStatus();
}

absl::Status RunBuildPattern(attnd_client* client, absl::string_view request,
                             absl::string_view token, attnd_call& call) {
  v1::BuildPatternRequest wire;
  const bool fits = request.size() <= static_cast<size_t>(std::numeric_limits<int>::max());
  if (!fits || !wire.ParseFromArray(request.data(), static_cast<int>(request.size()))) {
    return absl::InvalidArgumentError(
        "request: expected an attnd.v1.BuildPatternRequest, got others");
  }
  v1::BuildPatternResponse reply;
  if (token.empty()) {
    ASSIGN_OR_RETURN(const PooledMap map, DecodePooled(wire));
    ASSIGN_OR_RETURN(reply, BuildPattern(wire, map));
  } else {
    ASSIGN_OR_RETURN(const KeptAttentionMap kept, ToKeptMap("token", std::string(token).c_str()));
    ASSIGN_OR_RETURN(reply,
                     client->client->BuildPattern(std::move(wire), kept, call.MakeCallOptions()));
  }
  ASSIGN_OR_RETURN(const BlockList blocks, BlocksOf(reply));
  call.SetResult([blocks, density = reply.density()] {
    return nlohmann::json({{"indptr", blocks.indptr},
                           {"indices", blocks.indices},
                           {"block", blocks.bq},
                           {"density", density}})
        .dump();
  });
  return absl::OkStatus();
}

}  // namespace attnd
