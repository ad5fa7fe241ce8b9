// The window of an HTTP/2 connection: what a peer may send on it before any of it has been read.
//
// gRPC 1.51 begins with the protocol's 64 KiB and has no setting for it: what
// GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES sets is the window of a stream, and only its probe for the
// bandwidth-delay product, which costs large transfers within a host up to a tenth, widens the
// connection's. A call above 64 KiB waits then for the other end to wake up and to open the
// window, each way, which is a fifth to two fifths of the latency of a small one
// (docs/PERFORMANCE.md, A small call). A program that links this begins without the probe with
// kConnectionWindow, which gRPC announces with its first bytes.
//
// For that one of gRPC's functions is replaced by the linker, where gRPC lies within the program;
// with gRPC as a shared library all is as without.
#pragma once

#include <cstdint>

namespace attnd {

// A small call (Connections::kSmallCallBytes) with its headers, and what gRPC has by itself.
inline constexpr int64_t kConnectionWindow = (256 << 10) + (64 << 10);

}  // namespace attnd
