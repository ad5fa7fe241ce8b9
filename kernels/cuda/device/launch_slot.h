// LaunchSlot: what a launch of a GPU needs besides memory, made at the start: events around its
// parts and page-locked memory for what is small.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "kernels/cuda/device/launch_turns.h"
#include "kernels/cuda/driver/handles.h"

namespace attnd::cuda {

// Descriptors and tiles of a launch pass through this much page-locked memory at a time.
inline constexpr int64_t kBounceBytes = int64_t{1} << 20;

struct LaunchSlot {
  struct Slice {
    Event begin, end;
  };
  Event upload_begin, upload_end, later_upload_end, download_begin, download_end;
  std::array<Slice, LaunchTurns::kDepth> slices;  // at work, in turns
  PinnedMemory bounce;

  absl::Status Start(const Driver& driver) {
    std::vector<Event*> events = {&upload_begin, &upload_end, &later_upload_end, &download_begin,
                                  &download_end};
    for (Slice& slice : slices) {
      events.push_back(&slice.begin);
      events.push_back(&slice.end);
    }
    for (Event* event : events) {
      ASSIGN_OR_RETURN(*event, Event::Create(driver, /*timed=*/true));
    }
    ASSIGN_OR_RETURN(bounce, PinnedMemory::Allocate(driver, kBounceBytes));
    return absl::OkStatus();
  }
};

}  // namespace attnd::cuda
