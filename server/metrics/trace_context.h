// TraceContext: where a call stands in its caller's trace, from the metadata `traceparent`:
//
//     00-<trace, 32 hex digits>-<parent span, 16>-<flags, 2>      bit 0 of the flags: sampled
//
// Source: W3C Trace Context, level 1. A value that it calls invalid is no trace.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace attnd {

struct TraceContext {
  std::string trace_id, parent_id;  // empty: none
  bool sampled = false;
};

TraceContext ParseTraceparent(absl::string_view text);

}  // namespace attnd
