// attnd.v1.BuildPatternRequest → attention/patterns/block_pattern.h → BuildPatternResponse, for the
// daemon and for clients that build by themselves. Any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/patterns/block_pattern.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

// Averages of blocks, [blocks, blocks].
struct PooledMap {
  std::vector<float> averages;
  int64_t blocks = 0;
};

// Reads the pooled map that the request itself brings. InvalidArgument "pooled: expected ..., got
// ..."
absl::StatusOr<PooledMap> DecodePooled(const v1::BuildPatternRequest& request);

// The request's rule on a map. InvalidArgument "field: expected ..., got ...".
absl::StatusOr<v1::BuildPatternResponse> BuildPattern(const v1::BuildPatternRequest& request,
                                                      const PooledMap& map);

}  // namespace attnd
