// Framing of streamed calls: the bytes that stand before a header or before a chunk's data, so that
// either end can send payloads from where they lie. Any thread.
#pragma once

#include <cstdint>
#include <string>

namespace attnd {

inline constexpr int64_t kMaxChunkBytes = int64_t{4} << 20;  // of data, either way
// Chunk sizes of attnd's own ends. Within a host chunks are large, since a byte then costs a tenth
// less. Elsewhere a slow link has to move a whole one within --stream_idle_seconds. A message of
// either is below gRPC's default limit of 4 MiB.
inline constexpr int64_t kChunkBytes = int64_t{1} << 20;
inline constexpr int64_t kLargeChunkBytes = (int64_t{4} << 20) - (int64_t{64} << 10);

// The payloads of a call that is one message each way, together each way.
inline constexpr int64_t kWholeBytes = int64_t{64} << 10;

// A whole message with the header's bytes.
std::string FrameHeader(const std::string& header);
// Makes the bytes that stand before `data_bytes` of the payload with this field number, from its
// byte `offset` on.
std::string ChunkPrefix(int field, int64_t offset, int64_t data_bytes);

}  // namespace attnd
