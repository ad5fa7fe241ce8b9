// The C interface of captures. A kept map's token is text here: the index of its server's address,
// a colon, the bytes in hexadecimal digits. Any thread.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/problem.h"
#include "client/c/attnd_client.h"
#include "client/c/call.h"
#include "client/types/capture.h"

namespace attnd {

// `text` may be null: no map. InvalidArgument naming `field`.
absl::StatusOr<KeptAttentionMap> ToKeptMap(absl::string_view field, const char* text);

absl::StatusOr<CaptureOptions> ToCaptureOptions(const attnd_capture& from);
// Writes the pooled map to the caller's array.
absl::Status GivePooled(const Problem& problem, const attnd_capture& to,
                        const CapturedAttention& captured);

// `token` empty: from the request alone.
absl::Status RunBuildPattern(attnd_client* client, absl::string_view request,
                             absl::string_view token, attnd_call& call);

}  // namespace attnd
