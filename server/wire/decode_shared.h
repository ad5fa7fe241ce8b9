// PlacesOf: where a call says that its tensors lie in shared memory. Sizes are checked with the
// payloads, bounds where the regions are known (server/shared_memory). A value; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/call/call.h"

namespace attnd {

struct SharedPlace {
  int id;  // v1::TensorName
  int region;
  uint64_t offset;
  int64_t bytes;
};
struct SharedPlaces {
  std::unique_ptr<SharedRequest> request;  // null: the message names none
  std::vector<SharedPlace> places;

  const SharedPlace* Find(int id) const {
    for (const SharedPlace& place : places) {
      if (place.id == id) return &place;
    }
    return nullptr;
  }
};

// INVALID_ARGUMENT "shared_memory...".
absl::StatusOr<SharedPlaces> PlacesOf(const v1::SharedMemory& wire);

absl::Status BadShared(absl::string_view field, absl::string_view expected, absl::string_view got);

}  // namespace attnd
