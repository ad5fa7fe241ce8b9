// ShardReceipt: how one shard was computed, as its reply tells it: an attnd.v1.Receipt, read from
// the wire without the generated class, whose parsing and strings took a tenth of a small call's
// instructions. Any thread.
#pragma once

#include <google/protobuf/io/coded_stream.h>

#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"

namespace attnd {

struct ShardReceipt {
  struct Stage {
    std::string name;
    absl::Duration duration;
  };
  std::string backend, device, kernel;
  bool float16 = false;  // accumulated in it
  float dropout_p_effective = 0;
  bool deterministic = false;
  absl::InlinedVector<Stage, 6> stages;
};

// Reads what stands between here and the stream's limit into `receipt`, skipping fields that it
// does not know; false when that is no receipt.
bool ReadReceipt(google::protobuf::io::CodedInputStream& in, ShardReceipt& receipt);

}  // namespace attnd
