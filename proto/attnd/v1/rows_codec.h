// attnd.v1.Rows → CallRows, field by field; CheckRows says whether they fit a module. Errors are
// InvalidArgument "rows.lengths.cu_seqlens_k: expected ..., got ...". Any thread.
#pragma once

#include "absl/status/statusor.h"
#include "modules/call_rows.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

absl::StatusOr<CallRows> DecodeRows(const v1::Rows& wire);

}  // namespace attnd
