#include "tests/emulator/shared_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace attnd::emulator {
namespace {

constexpr int kGranule = 2;  // bytes: the smallest access of a kernel
constexpr int kBanks = 32;
constexpr int kWordBytes = 4;
constexpr int16_t kSeveralLanes = -1;
constexpr int64_t kAlignment = 1024;  // of swizzles

const char* VerbOf(Access access) {
  return access == Access::kLoad ? "load" : access == Access::kStore ? "store" : "atomic";
}

// Distinct words in the busiest bank among lanes [begin, end).
int BusiestBank(const uint32_t* offsets, uint32_t active, int bytes, int begin, int end) {
  uint32_t words[kBanks][kWarpSize];
  int distinct[kBanks] = {};
  int busiest = 0;
  for (int lane = begin; lane < end; ++lane) {
    if (!(active >> lane & 1)) continue;
    uint32_t first = offsets[lane] / kWordBytes;
    uint32_t last = (offsets[lane] + bytes - 1) / kWordBytes;
    for (uint32_t word = first; word <= last; ++word) {
      uint32_t bank = word % kBanks;
      uint32_t* end_of_bank = words[bank] + distinct[bank];
      if (std::find(words[bank], end_of_bank, word) != end_of_bank) continue;
      *end_of_bank = word;
      busiest = std::max(busiest, ++distinct[bank]);
    }
  }
  return busiest;
}

}  // namespace

Wavefronts CountWavefronts(const uint32_t offsets[kWarpSize], uint32_t active, int bytes) {
  int lanes_a_phase = bytes <= 4 ? kWarpSize : bytes == 8 ? kWarpSize / 2 : kWarpSize / 4;
  Wavefronts result;
  for (int begin = 0; begin < kWarpSize; begin += lanes_a_phase) {
    int busiest = BusiestBank(offsets, active, bytes, begin, begin + lanes_a_phase);
    result.total += busiest;
    result.conflicts += std::max(busiest - 1, 0);
  }
  return result;
}

SharedMemory::SharedMemory(int64_t bytes, int warps, Options options)
    : bytes_(bytes), warps_(warps), options_(options), memory_(bytes + kAlignment) {
  CHECK(warps >= 1 && warps <= kMaxWarps) << warps;
  auto address = reinterpret_cast<uintptr_t>(memory_.data());
  pad_ = static_cast<int64_t>((kAlignment - address % kAlignment) % kAlignment);
  sites_.resize(warps);
  BeginBlock();
}

void SharedMemory::BeginBlock() {
  std::memset(memory_.data(), 0xA5, memory_.size());
  written_.assign(bytes_, 0);
  copied_.assign(bytes_, 0);
  copies_ = 0;
  warp_phase_.assign(warps_, 0);
  clocks_.assign(warps_, Clocks(warps_, 0));
  for (int warp = 0; warp < warps_; ++warp) clocks_[warp][warp] = 1;
  barrier_clocks_.assign(kBarriers, Clocks(warps_, 0));
  if (!options_.detect_races) return;
  int64_t granules = (bytes_ + kGranule - 1) / kGranule;
  writes_.assign(granules, Epoch());
  reads_.assign(granules * warps_, Epoch());
}

std::string SharedMemory::Check(const void* pointer, int bytes, Access access, int thread,
                                const std::source_location& site) {
  int64_t offset = static_cast<const std::byte*>(pointer) - data();
  if (offset < 0 || offset + bytes > bytes_) {
    return absl::StrCat("shared ", VerbOf(access), " of ", bytes, " bytes at offset ", offset,
                        " of ", bytes_);
  }
  if (offset % bytes != 0) {
    return absl::StrCat("misaligned shared ", VerbOf(access), " of ", bytes, " bytes at offset ",
                        offset);
  }
  if (copies_ > 0 && std::memchr(copied_.data() + offset, 1, bytes) != nullptr) {
    return absl::StrCat("shared ", VerbOf(access), " of ", bytes, " bytes at offset ", offset,
                        ", whose copy is under way");
  }
  uint8_t* written = written_.data() + offset;
  if (access != Access::kStore && std::memchr(written, 0, bytes) != nullptr) {
    return absl::StrCat("shared ", VerbOf(access), " of ", bytes, " bytes at offset ", offset,
                        ", which nothing wrote");
  }
  std::memset(written, 1, bytes);
  if (options_.count_conflicts) {
    RecordBanks(static_cast<uint32_t>(offset), bytes, access, thread, site);
  }
  return options_.detect_races ? CheckOrder(offset, bytes, access, thread) : "";
}

void SharedMemory::BeginCopy(const void* address, int bytes) {
  std::memset(copied_.data() + (static_cast<const std::byte*>(address) - data()), 1, bytes);
  ++copies_;
}

void SharedMemory::EndCopy(const void* address, int bytes) {
  std::memset(copied_.data() + (static_cast<const std::byte*>(address) - data()), 0, bytes);
  --copies_;
}

bool SharedMemory::Ordered(const Epoch& before, int warp, int lane) const {
  if (before.clock == 0) return true;
  if (before.warp != warp) return clocks_[warp][before.warp] >= before.clock;
  return before.lane == lane || before.phase < warp_phase_[warp];
}

std::string SharedMemory::CheckOrder(int64_t offset, int bytes, Access access, int thread) {
  int warp = thread / kWarpSize, lane = thread % kWarpSize;
  const Epoch now{clocks_[warp][warp], warp_phase_[warp], static_cast<int16_t>(warp),
                  static_cast<int16_t>(lane)};
  auto race = [&](const Epoch& before, const char* what) {
    return absl::StrCat(
        "race: shared ", VerbOf(access), " at offset ", offset, " by thread ", thread,
        " is not ordered after a ", what, " by warp ", before.warp,
        before.lane == kSeveralLanes ? ", several lanes" : absl::StrCat(", lane ", before.lane));
  };
  for (int64_t g = offset / kGranule; g <= (offset + bytes - 1) / kGranule; ++g) {
    if (!Ordered(writes_[g], warp, lane)) return race(writes_[g], "store");
    Epoch* reads = &reads_[g * warps_];
    if (access != Access::kLoad) {
      for (int w = 0; w < warps_; ++w) {
        if (!Ordered(reads[w], warp, lane)) return race(reads[w], "load");
      }
      writes_[g] = now;
    }
    if (access == Access::kStore) continue;
    bool shared = reads[warp].clock == now.clock && reads[warp].phase == now.phase &&
                  reads[warp].lane != now.lane;
    reads[warp] = now;
    if (shared) reads[warp].lane = kSeveralLanes;
  }
  return "";
}

void SharedMemory::ArriveAtBarrier(int id, int warp) {
  Release(warp, barrier_clocks_[id]);
  ++warp_phase_[warp];
}

void SharedMemory::PassBarrier(int id, int warp) {
  for (int w = 0; w < warps_; ++w) {
    clocks_[warp][w] = std::max(clocks_[warp][w], barrier_clocks_[id][w]);
  }
}

void SharedMemory::Release(int warp, Clocks& to) {
  to.resize(static_cast<size_t>(warps_), 0);
  for (int w = 0; w < warps_; ++w) to[w] = std::max(to[w], clocks_[warp][w]);
  ++clocks_[warp][warp];
}

void SharedMemory::Acquire(int warp, const Clocks& from) {
  for (size_t w = 0; w < from.size(); ++w) {
    clocks_[warp][w] = std::max(clocks_[warp][w], from[w]);
  }
  ++warp_phase_[warp];
}

void SharedMemory::ResetBarrier(int id) { barrier_clocks_[id].assign(warps_, 0); }

SharedMemory::Site& SharedMemory::FindSite(int warp, int bytes, Access access,
                                           const std::source_location& site) {
  auto same = [&](const BankReport& report) {
    return report.site.line() == site.line() && report.site.column() == site.column() &&
           report.site.file_name() == site.file_name() && report.bytes == bytes &&
           report.access == access;
  };
  for (Site& candidate : sites_[warp]) {
    if (same(reports_[candidate.report])) return candidate;
  }
  auto known = std::find_if(reports_.begin(), reports_.end(), same);
  Site created;
  created.report = static_cast<int>(known - reports_.begin());
  if (known == reports_.end()) {
    BankReport report;
    report.site = site;
    report.bytes = bytes;
    report.access = access;
    reports_.push_back(report);
  }
  return sites_[warp].emplace_back(created);
}

void SharedMemory::RecordBanks(uint32_t offset, int bytes, Access access, int thread,
                               const std::source_location& where) {
  int lane = thread % kWarpSize;
  Site& site = FindSite(thread / kWarpSize, bytes, access, where);
  auto index = static_cast<size_t>(site.count[lane]++ - site.first);
  while (site.pending.size() <= index) site.pending.emplace_back();
  Pending& pending = site.pending[index];
  pending.offsets[lane] = offset;
  pending.lanes |= 1u << lane;
  if (pending.lanes != ~0u || index != 0) return;
  size_t complete = 0;
  while (complete < site.pending.size() && site.pending[complete].lanes == ~0u) ++complete;
  Retire(site, complete);
}

void SharedMemory::Retire(Site& site, size_t count) {
  BankReport& report = reports_[site.report];
  for (size_t i = 0; i < count; ++i) {
    const Pending& pending = site.pending[i];
    Wavefronts cost = CountWavefronts(pending.offsets, pending.lanes, report.bytes);
    ++report.instructions;
    report.wavefronts += cost.total;
    report.conflicts += cost.conflicts;
  }
  site.pending.erase(site.pending.begin(), site.pending.begin() + count);
  site.first += static_cast<int64_t>(count);
}

void SharedMemory::EndBlock() {
  for (auto& warp : sites_) {
    for (Site& site : warp) Retire(site, site.pending.size());
    warp.clear();
  }
}

}  // namespace attnd::emulator
