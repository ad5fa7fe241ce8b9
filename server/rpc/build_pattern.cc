#include "server/rpc/build_pattern.h"

#include "absl/strings/str_cat.h"
#include "attention/patterns/attention_map.h"
#include "base/status_macros.h"
#include "kernels/backend.h"
#include "proto/attnd/v1/pattern_codec.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr int kMaxReleasedMaps = 1024;  // of one call

absl::StatusOr<PooledMap> PoolKept(const v1::BuildPatternRequest& wire, absl::string_view caller,
                                   MapTable& maps) {
  ASSIGN_OR_RETURN(const auto kept, maps.Find(wire.token(), caller, "token"));
  const MapShape shape = {kept->rows, kept->keys, wire.block()};
  if (shape.block < 1 || shape.block > kMaxCaptureLength) {
    return FieldError(reason::kBadField, "block", absl::StrCat("1..", kMaxCaptureLength),
                      absl::StrCat(shape.block));
  }
  if (kept->rows != kept->keys) {
    return FieldError(reason::kBadShape, "token", "a map with as many rows as keys",
                      absl::StrCat(kept->rows, " and ", kept->keys));
  }
  return PooledMap{
      wire.diagonals() ? PoolDiagonals(shape, kept->map) : PoolBlocks(shape, kept->map),
      shape.row_blocks()};
}

absl::StatusOr<v1::BuildPatternResponse> Build(const v1::BuildPatternRequest& wire,
                                               absl::string_view caller, MapTable& maps) {
  ASSIGN_OR_RETURN(const PooledMap map,
                   wire.token().empty() ? DecodePooled(wire) : PoolKept(wire, caller, maps));
  return BuildPattern(wire, map);
}

}  // namespace

absl::StatusOr<v1::BuildPatternResponse> BuildPatternOfCaller(SmallCall& call, MapTable& maps) {
  v1::BuildPatternRequest wire;
  RETURN_IF_ERROR(call.Decode(wire));
  if (wire.token().empty() == wire.pooled().empty()) {
    return FieldError(reason::kBadField, "pooled", "exactly one of token and pooled",
                      wire.token().empty() ? "none" : "both");
  }
  absl::StatusOr<v1::BuildPatternResponse> reply = Build(wire, call.caller(), maps);
  if (!reply.ok()) return Classified(reply.status());
  return reply;
}

absl::Status ReleaseCapture(SmallCall& call, MapTable& maps) {
  v1::ReleaseCaptureRequest wire;
  RETURN_IF_ERROR(call.Decode(wire));
  if (wire.tokens_size() > kMaxReleasedMaps) {
    return FieldError(reason::kBadField, "tokens", absl::StrCat("at most ", kMaxReleasedMaps),
                      absl::StrCat(wire.tokens_size()));
  }
  for (int n = 0; n < wire.tokens_size(); ++n) {
    RETURN_IF_ERROR(maps.Release(wire.tokens(n), call.caller(), absl::StrCat("tokens[", n, "]")));
  }
  return absl::OkStatus();
}

}  // namespace attnd
