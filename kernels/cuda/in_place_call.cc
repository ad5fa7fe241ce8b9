#include "kernels/cuda/in_place_call.h"

#include <utility>

namespace attnd::cuda {
namespace {

uint64_t AddressIn(uint64_t arena, int64_t offset) { return arena + static_cast<uint64_t>(offset); }

uint64_t AddressOf(const void* tensor) { return reinterpret_cast<uint64_t>(tensor); }

}  // namespace

TensorAddresses AddressesOf(const ForwardCall& call) {
  return {.q = AddressOf(call.q),
          .k = AddressOf(call.k),
          .v = AddressOf(call.v),
          .o = AddressOf(call.o),
          .lse = AddressOf(call.lse),
          .strides = call.strides};
}
TensorAddresses AddressesOf(const BackwardCall& call) {
  return {.q = AddressOf(call.q),
          .k = AddressOf(call.k),
          .v = AddressOf(call.v),
          .o = AddressOf(call.o),
          .lse = AddressOf(call.lse),
          .d_o = AddressOf(call.d_o),
          .d_q = AddressOf(call.d_q),
          .d_k = AddressOf(call.d_k),
          .d_v = AddressOf(call.d_v),
          .strides = call.strides,
          .d_strides = call.d_strides};
}

std::vector<DeviceRange> ZeroedRanges(const LaunchPlan& plan, uint64_t arena) {
  std::vector<DeviceRange> ranges;
  int64_t begin = 0, end = 0;
  const auto add = [&] {
    if (end > begin) ranges.push_back({AddressIn(arena, begin), end - begin});
  };
  for (const Region& region : plan.arena.regions()) {
    if (region.offset >= plan.constants_begin) break;
    if (region.use != RegionUse::kZeroed || region.bytes == 0) continue;
    if (region.offset - end >= kRegionAlignment) {
      add();
      begin = region.offset;
    }
    end = region.offset + region.bytes;
  }
  add();
  return ranges;
}

std::vector<DeviceRange> ZeroedGradients(const ForwardCall&) { return {}; }

// Keys beyond a key length are visited by no kernel: their gradients are zero.
std::vector<DeviceRange> ZeroedGradients(const BackwardCall& call) {
  const Problem& p = *call.problem;
  if (p.kv_lengths.empty()) return {};
  return {{AddressOf(call.d_k), KeyRows(p).padded_bytes()},
          {AddressOf(call.d_v), ValueRows(p).padded_bytes()}};
}

InPlaceCall::InPlaceCall(LaunchPlan plan, uint64_t arena, std::vector<DeviceRange> zeroed,
                         double seconds)
    : plan_(std::move(plan)), arena_(arena), zeroed_(std::move(zeroed)), seconds_(seconds) {
  for (const DeviceRange& range : ZeroedRanges(plan_, arena)) zeroed_.push_back(range);
}

absl::StatusOr<std::vector<std::byte>> InPlaceCall::ConstantsAt(uint64_t address,
                                                                const KernelDevice& device) {
  plan_.PlaceConstants(arena_, address);
  return plan_.Constants(arena_, device);
}

}  // namespace attnd::cuda
