// Framing of streamed calls: the bytes that stand before a header or before a chunk's data, so that
// either end can send payloads from where they lie. Any thread.
#pragma once

#include <cstdint>
#include <string>

namespace attnd {

inline constexpr int64_t kMaxChunkBytes = int64_t{4} << 20;  // of data, either way
// What attnd's own ends send: a tenth faster than 4 MiB, since a chunk is still in the receiving
// core's cache when it lands.
inline constexpr int64_t kChunkBytes = int64_t{1} << 20;

// A whole message with the header's bytes.
std::string FrameHeader(const std::string& header);
// What comes before `data_bytes` of the payload with this field number, from its byte `offset` on.
std::string ChunkPrefix(int field, int64_t offset, int64_t data_bytes);

}  // namespace attnd
