// The memory that gRPC receives into: its slices, full or not yet, as long as anybody holds them.
//
// gRPC 1.51 counts them for its ResourceQuota and tells nobody. In a program that links this the
// linker puts a function of ours before the one that makes them, where gRPC lies within the
// program: they are counted here, and no longer by the ResourceQuota. With gRPC as a shared library
// everything is as it was.
//
// A connection keeps free slices for its next read, as much as the last brought, up to megabytes.
// So new ones are small once there is much.
#pragma once

#include <atomic>
#include <cstdint>

namespace attnd {

// Bytes, of the process; of each thread kUntoldReceivedBytes may be missing.
inline constexpr int64_t kUntoldReceivedBytes = 256 << 10;
const std::atomic<int64_t>& ReceivedSliceBytes();

// Beyond so many bytes new slices are small.
void SetReceivedSlicesSmallBeyond(int64_t bytes);

}  // namespace attnd
