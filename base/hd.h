// ATTN_HD marks a function that the host and the device compile from the same text, and gives
// device code the fixed-width integers that NVRTC (which has no standard headers) lacks.
#pragma once

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#define ATTN_HD __host__ __device__ __forceinline__
#elif defined(ATTND_EMULATED_KERNELS)
// For one instruction set and in files of their own: calls make them compile three times as fast.
#include <cstdint>
#define ATTN_HD inline
#else
#include <cstdint>
// Forced inline, so that no out-of-line copy built for one instruction set can be linked into
// another.
#define ATTN_HD inline __attribute__((always_inline))
#endif
