// Captures: a forward's averaged attention map, and block patterns built from it
// (attnd/v1/capture.proto has the meaning of each field).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace attnd {

// A map that a server keeps, as a forward gave it.
struct KeptAttentionMap {
  std::string token;  // empty: none
  int address = -1;   // index in ClientOptions::addresses of the server that has it
};

struct CaptureOptions {
  int64_t block = 0;          // rows and keys of a block of the pooled map
  bool keep = false;          // keep the map itself on the server
  KeptAttentionMap previous;  // the result has the distance from it
};

struct CapturedAttention {
  std::vector<float> pooled;  // [⌈q_len / block⌉, ⌈kv_len / block⌉]
  double mean = 0, variance = 0, skewness = 0;
  std::optional<double> distance;
  KeptAttentionMap kept;
};

}  // namespace attnd
