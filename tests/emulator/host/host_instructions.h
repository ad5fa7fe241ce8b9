// The host's bodies of the instructions in instructions.h: same names, same arguments, and last the
// place in the source, for messages and bank counts. They act for the running thread of a Launch
// (block.h). What crosses lanes waits for all 32 lanes; memory is checked at each access.
//
// Differences from the device: Exp2 and Log2 are the C library's (device: within 2 ulp).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/element.h"
#include "tests/emulator/block.h"
#include "tests/emulator/vector_types.h"

namespace attnd::ptx {

namespace host {

using emulator::Access;
using emulator::SourceLocation;

inline constexpr uint32_t kAllLanes = 0xffffffffu;

template <class T>
T Load(const void* p, const SourceLocation& where, bool shared) {
  if (shared) {
    emulator::CheckShared(p, sizeof(T), Access::kLoad, where);
  } else {
    emulator::CheckGlobal(p, sizeof(T), Access::kLoad, where);
  }
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}
template <class T>
void Store(void* p, const T& value, const SourceLocation& where, bool shared) {
  if (shared) {
    emulator::CheckShared(p, sizeof(T), Access::kStore, where);
  } else {
    emulator::CheckGlobal(p, sizeof(T), Access::kStore, where);
  }
  std::memcpy(p, &value, sizeof(T));
}

struct Exchange {
  uint32_t value, result;
  int partner;
};
inline void RunExchange(void* const* lanes, uint32_t) {
  for (int lane = 0; lane < 32; ++lane) {
    auto* own = static_cast<Exchange*>(lanes[lane]);
    own->result = static_cast<Exchange*>(lanes[own->partner])->value;
  }
}

struct Vote {
  bool condition;
  uint32_t ballot;
};
inline void RunVote(void* const* lanes, uint32_t) {
  uint32_t ballot = 0;
  for (int lane = 0; lane < 32; ++lane) {
    ballot |= uint32_t{static_cast<Vote*>(lanes[lane])->condition} << lane;
  }
  for (int lane = 0; lane < 32; ++lane) static_cast<Vote*>(lanes[lane])->ballot = ballot;
}

inline uint16_t TruncateToHalf(float value) {
  uint16_t half = Float16FromFloat(value);
  if (value != value || std::isinf(value)) return half;
  if (std::fabs(FloatFromFloat16(half)) > std::fabs(value)) --half;  // infinity becomes 65504
  return half;
}

}  // namespace host

#define ATTN_WHERE host::SourceLocation where = host::SourceLocation::current()

inline uint32_t PackTruncated(float low, float high) {
  return host::TruncateToHalf(low) | uint32_t{host::TruncateToHalf(high)} << 16;
}
inline uint32_t PackRounded(float low, float high) {
  return Float16FromFloat(low) | uint32_t{Float16FromFloat(high)} << 16;
}
inline float LowHalf(uint32_t word) { return FloatFromFloat16(static_cast<uint16_t>(word)); }
inline float HighHalf(uint32_t word) { return FloatFromFloat16(static_cast<uint16_t>(word >> 16)); }
inline uint32_t FloatBits(float value) { return BitsOf(value); }
inline float BitsFloat(uint32_t bits) { return FloatOf(bits); }

inline float Absolute(float x) { return std::fabs(x); }
inline int CountBits(uint32_t x) { return __builtin_popcount(x); }
inline float Round(float x) { return std::nearbyint(x); }
inline int32_t RoundToInt(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  if (x < -2147483648.0f) return -2147483647 - 1;
  return static_cast<int32_t>(std::nearbyint(x));
}
inline float Exp2(float x) {
  float y = std::exp2(x);
  return y < 0x1p-126f ? 0 : y;
}
inline float Log2(float x) { return std::log2(x); }
inline float Reciprocal(float x) { return 1 / x; }
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float Max(float a, float b) { return std::fmax(a, b); }
inline uint64_t MultiplyWide(uint32_t a, uint32_t b) { return uint64_t{a} * b; }
inline int Keep(int value) { return value; }
inline uint32_t Keep(uint32_t value) { return value; }
inline const char* Offset(const void* base, int count, int bytes) {
  return static_cast<const char*>(base) + int64_t{count} * bytes;
}
inline uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int n = 0; n < 4; ++n) {
    uint32_t pick = selector >> 4 * n & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (pick & 7)) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * n;
  }
  return result;
}

inline uint32_t ShuffleXor(uint32_t value, int mask, ATTN_WHERE) {
  host::Exchange exchange{value, 0, emulator::CurrentLane() ^ (mask & 31)};
  emulator::MeetInWarp(&host::RunExchange, &exchange, host::kAllLanes, where);
  return exchange.result;
}
inline float ShuffleXor(float value, int mask, ATTN_WHERE) {
  return FloatOf(ShuffleXor(BitsOf(value), mask, where));
}
inline uint32_t Ballot(bool condition, ATTN_WHERE) {
  host::Vote vote{condition, 0};
  emulator::MeetInWarp(&host::RunVote, &vote, host::kAllLanes, where);
  return vote.ballot;
}
inline bool VoteAny(bool condition, ATTN_WHERE) { return Ballot(condition, where) != 0; }
inline void SyncWarp(ATTN_WHERE) { emulator::SynchroniseWarp(host::kAllLanes, where); }

inline void SyncThreads(ATTN_WHERE) { emulator::WaitAtBarrier(0, 0, where); }
inline void BarrierSync(int id, int count, ATTN_WHERE) {
  emulator::WaitAtBarrier(id, count, where);
}
inline void BarrierArrive(int id, int count, ATTN_WHERE) {
  emulator::ArriveAtBarrier(id, count, where);
}

inline uint32_t LoadShared16(const void* p, ATTN_WHERE) {
  return host::Load<uint16_t>(p, where, true);
}
inline uint32_t LoadShared32(const void* p, ATTN_WHERE) {
  return host::Load<uint32_t>(p, where, true);
}
inline float LoadSharedFloat(const void* p, ATTN_WHERE) {
  return host::Load<float>(p, where, true);
}
inline uint2 LoadShared64(const void* p, ATTN_WHERE) { return host::Load<uint2>(p, where, true); }
inline float2 LoadSharedFloat2(const void* p, ATTN_WHERE) {
  return host::Load<float2>(p, where, true);
}
inline uint4 LoadShared128(const void* p, ATTN_WHERE) { return host::Load<uint4>(p, where, true); }
inline void StoreShared16(void* p, uint32_t v, ATTN_WHERE) {
  host::Store(p, static_cast<uint16_t>(v), where, true);
}
inline void StoreShared32(void* p, uint32_t v, ATTN_WHERE) { host::Store(p, v, where, true); }
inline void StoreSharedFloat(void* p, float v, ATTN_WHERE) { host::Store(p, v, where, true); }
inline void StoreShared64(void* p, uint2 v, ATTN_WHERE) { host::Store(p, v, where, true); }
inline void StoreShared128(void* p, uint4 v, ATTN_WHERE) { host::Store(p, v, where, true); }
inline double LoadSharedDouble(const void* p, ATTN_WHERE) {
  return host::Load<double>(p, where, true);
}
inline void StoreSharedDouble(void* p, double v, ATTN_WHERE) { host::Store(p, v, where, true); }

inline uint4 LoadConstant128(const void* p, ATTN_WHERE) {
  return host::Load<uint4>(p, where, false);
}
inline void LoadConstant128If(uint4& v, const void* p, bool condition, ATTN_WHERE) {
  if (condition) v = host::Load<uint4>(p, where, false);
}
inline float LoadConstantFloat(const void* p, ATTN_WHERE) {
  return host::Load<float>(p, where, false);
}
inline void LoadConstantFloatIf(float& v, const void* p, bool condition, ATTN_WHERE) {
  if (condition) v = host::Load<float>(p, where, false);
}
inline uint32_t LoadConstant32(const void* p, ATTN_WHERE) {
  return host::Load<uint32_t>(p, where, false);
}
inline void LoadConstant32If(uint32_t& v, const void* p, bool condition, ATTN_WHERE) {
  if (condition) v = host::Load<uint32_t>(p, where, false);
}
inline uint32_t LoadConstant16(const void* p, ATTN_WHERE) {
  return host::Load<uint16_t>(p, where, false);
}
inline uint32_t LoadConstant8(const void* p, ATTN_WHERE) {
  return host::Load<uint8_t>(p, where, false);
}
inline float LoadGlobalFloat(const void* p, ATTN_WHERE) {
  return host::Load<float>(p, where, false);
}
inline uint32_t LoadGlobal32(const void* p, ATTN_WHERE) {
  return host::Load<uint32_t>(p, where, false);
}
inline uint2 LoadGlobal64(const void* p, ATTN_WHERE) { return host::Load<uint2>(p, where, false); }
inline uint4 LoadGlobal128(const void* p, ATTN_WHERE) { return host::Load<uint4>(p, where, false); }
inline void StoreGlobal32(void* p, uint32_t v, ATTN_WHERE) { host::Store(p, v, where, false); }
inline void StoreGlobalFloat(void* p, float v, ATTN_WHERE) { host::Store(p, v, where, false); }
inline void StoreGlobalDouble(void* p, double v, ATTN_WHERE) { host::Store(p, v, where, false); }
inline void StoreGlobal64(void* p, uint2 v, ATTN_WHERE) { host::Store(p, v, where, false); }
inline void StoreGlobal128(void* p, uint4 v, ATTN_WHERE) { host::Store(p, v, where, false); }
inline void ReduceAdd(float* p, float v, ATTN_WHERE) {
  emulator::CheckGlobal(p, sizeof(float), host::Access::kAtomic, where);
  *p += v;
}
inline void ReduceAdd(int32_t* p, int32_t v, ATTN_WHERE) {
  emulator::CheckGlobal(p, sizeof(int32_t), host::Access::kAtomic, where);
  *p = static_cast<int32_t>(static_cast<uint32_t>(*p) + static_cast<uint32_t>(v));
}
inline void ReduceOr(uint32_t* p, uint32_t v, ATTN_WHERE) {
  emulator::CheckGlobal(p, sizeof(uint32_t), host::Access::kAtomic, where);
  *p |= v;
}
inline void ReduceOrIf(uint32_t* p, uint32_t v, bool condition, ATTN_WHERE) {
  if (condition) ReduceOr(p, v, where);
}
inline void ReduceMax(uint32_t* p, uint32_t v, ATTN_WHERE) {
  emulator::CheckGlobal(p, sizeof(uint32_t), host::Access::kAtomic, where);
  if (*p < v) *p = v;
}
inline int32_t LoadAcquire(const int32_t* p, ATTN_WHERE) {
  emulator::CheckGlobal(p, sizeof(int32_t), host::Access::kLoad, where);
  emulator::Poll(where);
  return *p;
}
inline int32_t AddAcquireRelease(int32_t* p, int32_t v, ATTN_WHERE) {
  const int32_t old = *p;
  ReduceAdd(p, v, where);
  return old;
}
inline void StoreRelease(int32_t* p, int32_t v, ATTN_WHERE) { host::Store(p, v, where, false); }

#undef ATTN_WHERE

}  // namespace attnd::ptx
