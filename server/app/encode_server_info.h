// Answers GetServerInfo. Features are found by asking the engine, not by a list.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/app/options.h"

namespace attnd {

// Room in a reply for the receipt and the tags.
inline constexpr int64_t kReplyHeaderBytes = 4096;

// A number that the next start will not repeat.
uint64_t NewBootEpoch();

v1::GetServerInfoResponse DescribeServer(const ServerOptions& options,
                                         const std::vector<const Backend*>& engines,
                                         uint64_t boot_epoch);

}  // namespace attnd
