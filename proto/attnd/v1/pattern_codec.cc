#include "proto/attnd/v1/pattern_codec.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/mask_codec.h"

namespace attnd {
namespace {

absl::StatusOr<PatternOptions> DecodePatternOptions(const v1::BuildPatternRequest& request) {
  PatternOptions options;
  options.force_diagonal = request.force_diagonal();
  options.min_blocks_per_row = request.min_blocks_per_row();
  switch (request.rule_case()) {
    case v1::BuildPatternRequest::kFlood:
      options.rule = PatternRule::kFlood;
      options.quantile = request.flood().quantile();
      return options;
    case v1::BuildPatternRequest::kTopK:
      options.rule = PatternRule::kTopK;
      options.density = request.top_k().density();
      return options;
    default:
      return absl::InvalidArgumentError("rule: expected flood or top_k, got none");
  }
}

}  // namespace

absl::StatusOr<PooledMap> DecodePooled(const v1::BuildPatternRequest& request) {
  const std::string& bytes = request.pooled();
  PooledMap map;
  const double count = static_cast<double>(bytes.size()) / sizeof(float);
  map.blocks = std::llround(std::sqrt(count));
  if (bytes.empty() || bytes.size() != map.blocks * map.blocks * sizeof(float)) {
    return absl::InvalidArgumentError(
        absl::StrCat("pooled: expected float32 [n, n], got ", bytes.size(), " bytes"));
  }
  if (request.diagonals()) {
    return absl::InvalidArgumentError("diagonals: expected false without a token, got true");
  }
  map.averages.resize(static_cast<size_t>(map.blocks * map.blocks));
  std::memcpy(map.averages.data(), bytes.data(), bytes.size());
  return map;
}

absl::StatusOr<v1::BuildPatternResponse> BuildPattern(const v1::BuildPatternRequest& request,
                                                      const PooledMap& map) {
  ASSIGN_OR_RETURN(const PatternOptions options, DecodePatternOptions(request));
  ASSIGN_OR_RETURN(BlockList blocks,
                   BuildBlockPattern(map.averages, map.blocks, int64_t{request.block()}, options));
  v1::BuildPatternResponse reply;
  reply.set_density(static_cast<double>(blocks.indices.size()) /
                    static_cast<double>(map.blocks * map.blocks));
  MaskSpec mask;
  mask.pattern.emplace_back(std::move(blocks));
  *reply.mutable_blocks() = std::move(*EncodeMaskSpec(mask).mutable_pattern(0)->mutable_blocks());
  return reply;
}

}  // namespace attnd
