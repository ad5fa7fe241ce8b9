#include "client/call/reply_landings.h"

#include "absl/strings/str_cat.h"

namespace attnd {

ReplyLandings::ReplyLandings(const std::vector<ReplyPayload>& payloads) {
  for (const ReplyPayload& payload : payloads) {
    landings_.push_back({payload, ChunkGrid(payload.runs.total_bytes())});
    missing_bytes_ += payload.runs.total_bytes();
  }
}

absl::StatusOr<RunCursor> ReplyLandings::Claim(uint64_t field, uint64_t offset, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  for (Landing& landing : landings_) {
    if (static_cast<uint64_t>(landing.payload.field_number) != field) continue;
    if (!landing.grid.Take(offset, bytes)) break;
    RunCursor cursor(landing.payload.runs, static_cast<std::byte*>(landing.payload.tensor));
    cursor.Skip(static_cast<int64_t>(offset));
    return cursor;
  }
  return absl::DataLossError(absl::StrCat("reply: chunk of field ", field, ": ", bytes,
                                          " bytes from ", offset, " are none that are missing"));
}

void ReplyLandings::Landed(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  missing_bytes_ -= bytes;
}

absl::Status ReplyLandings::CheckComplete() const {
  absl::MutexLock lock(&mutex_);
  if (missing_bytes_ == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("reply: ", missing_bytes_, " bytes have not come"));
}

}  // namespace attnd
