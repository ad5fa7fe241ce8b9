// The attention op of a layout, ↔ its message: heads, rotary, and those options of a Problem that
// are the op's. Errors name the path. Any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "modules/layout.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

// `path` is "block[0].op[3].attention".
absl::StatusOr<AttentionOp> DecodeAttentionOp(const v1::AttentionOp& wire, const std::string& path);
v1::AttentionOp EncodeAttentionOp(const AttentionOp& op);

}  // namespace attnd
