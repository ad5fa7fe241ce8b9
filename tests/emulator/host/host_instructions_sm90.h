// The host's bodies of instructions_sm90.h: same names, same arguments, and last the place in the
// source. Boxes come when somebody waits for their barrier, products happen when their warp waits
// for them, both as late as they may; fences and shares of registers mean nothing here.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/ptx/tensor_map.h"
#include "tests/emulator/host/host_instructions_sm80.h"
#include "tests/emulator/product_sm90.h"

namespace attnd::ptx {

namespace host {

struct WarpgroupLane {
  emulator::HalfKind kind;
  int groups;
  float* c;
  bool adds;
  const uint32_t* a;  // null: matrix_a
  uint64_t matrix_a, matrix_b;
  bool across_a, across_b;
  SourceLocation where;
};
inline void RunWarpgroup(void* const* lanes, uint32_t) {
  const auto& first = *static_cast<const WarpgroupLane*>(lanes[0]);
  emulator::WarpProduct product{.kind = first.kind,
                                .groups = first.groups,
                                .adds = first.adds,
                                .in_registers = first.a != nullptr,
                                .across_a = first.across_a,
                                .across_b = first.across_b,
                                .matrix_a = first.matrix_a,
                                .first_row = emulator::CurrentThread() / 32 % 4 * 16,
                                .matrix_b = first.matrix_b,
                                .where = first.where};
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const WarpgroupLane*>(lanes[lane]);
    product.c[lane] = own.c;
    if (own.a != nullptr) std::memcpy(product.a[lane], own.a, sizeof(product.a[lane]));
  }
  emulator::DoLater([product] { emulator::Multiply(product); });
}
template <int kGroups>
void Warpgroup(emulator::HalfKind kind, float (&c)[kGroups][4], const uint32_t* a,
               uint64_t matrix_a, uint64_t matrix_b, bool adds, const SourceLocation& where,
               bool across_a = false, bool across_b = false) {
  WarpgroupLane lane{kind,     kGroups,  &c[0][0], adds,     a,
                     matrix_a, matrix_b, across_a, across_b, where};
  emulator::MeetInWarp(&RunWarpgroup, &lane, kAllLanes, where);
}

template <class T>
void AddInBulk(T* to, const T* from, int bytes, const SourceLocation& where) {
  emulator::AddLater([=] {
    for (int n = 0; n < bytes / static_cast<int>(sizeof(T)); ++n) {
      emulator::CheckShared(from + n, sizeof(T), emulator::Access::kLoad, where);
      emulator::CheckGlobal(to + n, sizeof(T), emulator::Access::kAtomic, where);
      to[n] += from[n];
    }
  });
}

inline void StoreInBulk(uint32_t* to, const uint32_t* from, int bytes,
                        const SourceLocation& where) {
  emulator::AddLater([=] {
    for (int n = 0; n < bytes / 4; ++n) {
      emulator::CheckShared(from + n, 4, emulator::Access::kLoad, where);
      emulator::CheckGlobal(to + n, 4, emulator::Access::kStore, where);
      to[n] = from[n];
    }
  });
}

struct StoredRow {
  uint32_t words[4];  // of the lane
  uint16_t row[8];    // at its address
};
inline void RunStoreMatrices(void* const* lanes, uint32_t) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int n = 0; n < 4; ++n) {
      const uint32_t word = static_cast<const StoredRow*>(lanes[lane])->words[n];
      uint16_t* row = static_cast<StoredRow*>(lanes[8 * n + lane / 4])->row;
      row[lane % 4 * 2] = static_cast<uint16_t>(word);
      row[lane % 4 * 2 + 1] = static_cast<uint16_t>(word >> 16);
    }
  }
}

}  // namespace host

#define ATTN_WHERE host::SourceLocation where = host::SourceLocation::current()

inline void InitBarrier(uint64_t* barrier, int arrivals, ATTN_WHERE) {
  emulator::InitPhases(barrier, arrivals, where);
}
inline void FenceBarriers() {}
inline void Arrive(uint64_t* barrier, ATTN_WHERE) { emulator::ArriveAtPhase(barrier, 0, where); }
inline void ArriveExpecting(uint64_t* barrier, int bytes, ATTN_WHERE) {
  emulator::ArriveAtPhase(barrier, bytes, where);
}
inline void WaitForPhase(uint64_t* barrier, uint32_t parity, ATTN_WHERE) {
  emulator::WaitForPhase(barrier, parity, where);
}
inline void FenceShared() {}

inline void FenceMap(const TensorMap*) {}
inline void LoadBox(void* to, const TensorMap* map, int column, int row, int head, int batch,
                    uint64_t* barrier, ATTN_WHERE) {
  RowsBox box;
  std::memcpy(&box, map, sizeof(box));
  const bool is_there = head < box.heads && batch < box.entries;
  for (int r = 0; r < box.box_rows; ++r) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const bool exists = is_there && row + r < box.rows && column + chunk * 8 < box.columns;
      const auto* from = reinterpret_cast<const char*>(box.address) + batch * box.entry_bytes +
                         head * box.head_bytes + (row + r) * box.row_bytes +
                         (column + chunk * 8) * 2;
      const auto offset =
          static_cast<uint32_t>(static_cast<std::byte*>(to) - emulator::CurrentShared()) +
          static_cast<uint32_t>(r * 128 + chunk * 16);
      emulator::CopyInPhase(barrier, emulator::CurrentShared() + emulator::Swizzled(offset),
                            exists ? from : nullptr, 16, where);
    }
  }
}
inline void LoadInBulk(void* to, const void* from, int bytes, uint64_t* barrier, ATTN_WHERE) {
  for (int at = 0; at < bytes; at += 16) {
    emulator::CopyInPhase(barrier, static_cast<std::byte*>(to) + at,
                          static_cast<const char*>(from) + at, 16, where);
  }
}
inline void PrefetchBox(const TensorMap*, int, int, int, int) {}
inline void AddInBulk(float* to, const float* from, int bytes, ATTN_WHERE) {
  host::AddInBulk(to, from, bytes, where);
}
inline void AddInBulk(int32_t* to, const int32_t* from, int bytes, ATTN_WHERE) {
  host::AddInBulk(to, from, bytes, where);
}
inline void StoreInBulk(void* to, const void* from, int bytes, ATTN_WHERE) {
  host::StoreInBulk(static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), bytes, where);
}
inline void WaitForBulk() { emulator::WaitForSums(0); }
inline void FenceBulk() {}
inline void CommitBulk() { emulator::CommitSums(); }
template <int kLeft>
void WaitForBulkReads() {
  emulator::WaitForSums(kLeft);
}
inline void StoreMatrices(void* row, uint4 words, ATTN_WHERE) {
  host::StoredRow lane{{words.x, words.y, words.z, words.w}, {}};
  emulator::MeetInWarp(&host::RunStoreMatrices, &lane, host::kAllLanes, where);
  uint4 stored;
  std::memcpy(&stored, lane.row, sizeof(stored));
  host::Store(row, stored, where, true);
}
inline void Pause(uint32_t) {}
inline uint32_t AddGlobal(uint32_t* p, uint32_t value, ATTN_WHERE) {
  emulator::CheckGlobal(p, 4, emulator::Access::kAtomic, where);
  const uint32_t old = *p;
  *p += value;
  return old;
}
inline void AddRelease(uint32_t* p, uint32_t value, ATTN_WHERE) { AddGlobal(p, value, where); }
inline void WaitForCount(const uint32_t* p, int count, ATTN_WHERE) {
  while (LoadAcquire(reinterpret_cast<const int32_t*>(p), where) < count) {
  }
}
inline int Uniform(int value) { return value; }

template <int kRegisters>
void KeepRegisters() {}
template <int kRegisters>
void TakeRegisters() {}

inline uint64_t MatrixOf(const void* address, uint32_t leading, uint32_t stride) {
  return emulator::MatrixDescriptor(
      static_cast<uint32_t>(static_cast<const std::byte*>(address) - emulator::CurrentShared()),
      leading, stride);
}
inline uint64_t MovedMatrix(uint64_t matrix, uint32_t bytes) { return matrix + (bytes >> 4); }
inline void FenceProducts() {}
inline void CommitProducts(ATTN_WHERE) { emulator::CommitWork(where); }
template <int kGroups>
void WarpgroupHalf(float (&c)[kGroups][4], uint64_t a, uint64_t b, bool adds, ATTN_WHERE) {
  host::Warpgroup(emulator::HalfKind::kFloat16, c, nullptr, a, b, adds, where);
}
template <int kGroups>
void WarpgroupHalf(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b, ATTN_WHERE) {
  host::Warpgroup(emulator::HalfKind::kFloat16, c, a, 0, b, true, where);
}
template <int kGroups>
void WarpgroupBFloat16(float (&c)[kGroups][4], uint64_t a, uint64_t b, bool adds, ATTN_WHERE) {
  host::Warpgroup(emulator::HalfKind::kBFloat16, c, nullptr, a, b, adds, where);
}
template <int kGroups>
void WarpgroupBFloat16(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b, ATTN_WHERE) {
  host::Warpgroup(emulator::HalfKind::kBFloat16, c, a, 0, b, true, where);
}
#define ATTN_STORED_PRODUCTS(Name, kind)                                              \
  template <int kGroups>                                                              \
  void Name##First(float(&c)[kGroups][4], uint64_t a, uint64_t b, ATTN_WHERE) {       \
    host::Warpgroup(kind, c, nullptr, a, b, false, where);                            \
  }                                                                                   \
  template <int kGroups>                                                              \
  void Name##Next(float(&c)[kGroups][4], uint64_t a, uint64_t b, ATTN_WHERE) {        \
    host::Warpgroup(kind, c, nullptr, a, b, true, where);                             \
  }                                                                                   \
  template <int kGroups>                                                              \
  void Name##AcrossFirst(float(&c)[kGroups][4], uint64_t a, uint64_t b, ATTN_WHERE) { \
    host::Warpgroup(kind, c, nullptr, a, b, false, where, true, true);                \
  }                                                                                   \
  template <int kGroups>                                                              \
  void Name##Across(float(&c)[kGroups][4], uint64_t a, uint64_t b, ATTN_WHERE) {      \
    host::Warpgroup(kind, c, nullptr, a, b, true, where, true, true);                 \
  }                                                                                   \
  template <int kGroups>                                                              \
  void Name##AcrossB(float(&c)[kGroups][4], uint64_t a, uint64_t b, ATTN_WHERE) {     \
    host::Warpgroup(kind, c, nullptr, a, b, true, where, false, true);                \
  }
ATTN_STORED_PRODUCTS(WarpgroupHalf, emulator::HalfKind::kFloat16)
ATTN_STORED_PRODUCTS(WarpgroupBFloat16, emulator::HalfKind::kBFloat16)
#undef ATTN_STORED_PRODUCTS
template <int kLeft, int kGroups>
void WaitForProducts(float (&)[kGroups][4], ATTN_WHERE) {
  emulator::FinishWork(kLeft, where);
}
template <int kLeft>
void WaitForProducts(ATTN_WHERE) {
  emulator::FinishWork(kLeft, where);
}
template <int kGroups>
void Pin(float (&)[kGroups][4]) {}
inline void Pin(uint32_t&) {}

#undef ATTN_WHERE

}  // namespace attnd::ptx
