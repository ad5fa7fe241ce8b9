// SharedMemory: one block's shared memory in the emulator, with what a GPU cannot tell: bounds,
// reads of bytes that nothing wrote, races between barriers, and bank conflicts per instruction.
//
// Bank model (Volta; CUDA C++ Programming Guide, compute capability 5.x to 7.x): 32 banks of 4
// bytes; a 4-byte access is served for 32 lanes at once, an 8-byte one for half a warp at a time, a
// 16-byte one for a quarter. Lanes that read the same word share it. Within such a phase the
// instruction takes as many cycles ("wavefronts") as the busiest bank has distinct words; what
// exceeds one per phase is a conflict. Lanes are matched by call site and by how often each came by
// it, so the code of a warp must be uniform for exact counts, as warp-wide memory code is.
//
// Race model: two accesses of one word by different threads, one of them a store, race unless a
// barrier or a warp-level synchronisation orders them. Order between warps is kept in vector clocks
// (one per warp), order inside a warp by a count of its synchronisations. Source: Flanagan and
// Freund, FastTrack, PLDI 2009. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <vector>

#include "tests/emulator/global_memory.h"

namespace attnd::emulator {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxWarps = 32;
inline constexpr int kBarriers = 16;

// Counts what one memory instruction of the source cost, over a whole launch.
struct BankReport {
  std::source_location site;
  int bytes = 0;  // of one lane
  Access access = Access::kLoad;
  int64_t instructions = 0;  // warp instructions
  int64_t wavefronts = 0;
  int64_t conflicts = 0;  // wavefronts beyond the fewest that the width allows
};

// Wavefronts of one warp instruction; `active` is a lane mask, offsets count bytes.
struct Wavefronts {
  int total = 0, conflicts = 0;
};
Wavefronts CountWavefronts(const uint32_t offsets[kWarpSize], uint32_t active, int bytes);

class SharedMemory {
 public:
  struct Options {
    bool count_conflicts = false;
    bool detect_races = false;
  };

  SharedMemory(int64_t bytes, int warps, Options options);

  // 1024-byte aligned.
  std::byte* data() { return memory_.data() + pad_; }
  // Forgets contents and order; keeps the bank reports.
  void BeginBlock();

  // Empty when the access is legal (and then recorded), else what is wrong with it.
  std::string Check(const void* address, int bytes, Access access, int thread,
                    const std::source_location& site);

  // A copy into these bytes begins or ends; until it ends, no access to them is legal.
  void BeginCopy(const void* address, int bytes);
  void EndCopy(const void* address, int bytes);

  using Clocks = std::vector<uint32_t>;  // per warp
  // Order: the lanes of a warp met; a warp arrived at barrier `id`; the barrier opened for it.
  void WarpSynchronised(int warp) { ++warp_phase_[warp]; }
  void ArriveAtBarrier(int id, int warp);
  void PassBarrier(int id, int warp);
  void ResetBarrier(int id);
  // A lane hands over what its warp did, and one takes it; the other lanes of that warp count as
  // having met then.
  void Release(int warp, Clocks& to);
  void Acquire(int warp, const Clocks& from);
  // Counts the memory instructions that only some lanes reached.
  void EndBlock();

  const std::vector<BankReport>& reports() const { return reports_; }

 private:
  // When and by which thread a granule was last touched.
  struct Epoch {
    uint32_t clock = 0;  // of the warp; 0: never
    uint32_t phase = 0;  // synchronisations of the warp's lanes
    int16_t warp = 0;
    int16_t lane = 0;  // kSeveralLanes: more than one
  };
  struct Pending {  // one warp instruction that some lanes have reached
    uint32_t offsets[kWarpSize];
    uint32_t lanes = 0;
  };
  struct Site {
    int report = 0;
    int64_t first = 0;  // ordinal of pending[0]
    std::vector<Pending> pending;
    int64_t count[kWarpSize] = {};
  };

  bool Ordered(const Epoch& before, int warp, int lane) const;
  std::string CheckOrder(int64_t offset, int bytes, Access access, int thread);
  void RecordBanks(uint32_t offset, int bytes, Access access, int thread,
                   const std::source_location& site);
  Site& FindSite(int warp, int bytes, Access access, const std::source_location& site);
  void Retire(Site& site, size_t pending);

  const int64_t bytes_;
  const int warps_;
  const Options options_;
  std::vector<std::byte> memory_;
  int64_t pad_ = 0;
  std::vector<uint8_t> written_;
  std::vector<uint8_t> copied_;  // bytes whose copy is under way
  int64_t copies_ = 0;           // those copies

  std::vector<Epoch> writes_;   // per granule of kGranule bytes
  std::vector<Epoch> reads_;    // per granule and warp
  std::vector<Clocks> clocks_;  // what each warp knows of each
  std::vector<uint32_t> warp_phase_;
  std::vector<Clocks> barrier_clocks_;

  std::vector<BankReport> reports_;
  std::vector<std::vector<Site>> sites_;  // per warp
};

}  // namespace attnd::emulator
