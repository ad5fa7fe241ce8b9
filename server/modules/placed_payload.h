// PlacedPayload: one tensor of a Forward or Backward, and the memory where it lies. Values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/strings/string_view.h"
#include "server/admission/admission.h"
#include "server/admission/staging_pool.h"

namespace attnd {

struct PayloadSpec {
  int field;
  absl::string_view name;
  int64_t bytes;
  bool is_input;
  bool travels = true;  // false: an output that the caller did not ask for
};

struct StagedPayload {
  Ticket ticket;
  StagingBlock block;  // after the ticket: it is back before the promise
};

struct PlacedPayload {
  PayloadSpec spec;
  std::byte* data;
  // Also its chunks', on their way; null: the caller shares the memory.
  std::shared_ptr<const StagedPayload> block;

  bool IsReceived() const { return block != nullptr && spec.is_input; }
  bool IsSent() const { return block != nullptr && !spec.is_input && spec.travels; }
};

}  // namespace attnd
