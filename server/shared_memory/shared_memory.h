// SharedMemoryTable: the memory that callers on this host share with the daemon, by token. The
// control sockets' thread adds regions and closes sessions; calls look up what their headers name.
// A region lives until its session is closed and no call uses it.
//
//     AddRegion → SharedRegion::Map → proof both ways → engine's RegisterHost → token
//     Find      → token, owner, bounds, overlap → pointers and a use, for one call
//
// A token is 128 random bits. It is valid in calls of its owner, over the unix socket. Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/call/call.h"
#include "server/shared_memory/shared_session.h"

namespace attnd {

inline constexpr size_t kSharedProofBytes = 16;

struct SharedMemoryLimits {
  bool enabled = true;                         // control sockets beside unix sockets
  int64_t max_bytes = int64_t{64} << 30;       // of all regions together
  int64_t user_max_bytes = int64_t{64} << 30;  // of max_bytes, by one user id
  int max_connections = 256;                   // control connections
};

// A snapshot for metrics.
struct SharedMemoryUse {
  int64_t bytes = 0;
  int64_t regions = 0;
};

// The owner of a region.
struct RegionOwner {
  std::shared_ptr<SharedSession> session;
  uint32_t user_id = 0;  // of the peer, as the kernel says
  std::string caller;    // as Authenticator names the calls that may use it
};

struct AddedRegion {
  std::string token;
  std::string proof;  // written to the region's first bytes
  bool kept_outputs = false;
};

class MappedRegion;
class RegionLedger;

class SharedMemoryTable {
 public:
  static constexpr int64_t kMaxRegionsOfSession = 64;

  // `backend` outlives the table, and every call that uses a region. `kept_outputs`: callers are
  // told that forwards which are kept work in place too.
  SharedMemoryTable(const SharedMemoryLimits& limits, Backend& backend, bool kept_outputs);
  ~SharedMemoryTable();

  // `fd` remains the caller's to close. FAILED_PRECONDITION for what SharedRegion refuses and a
  // wrong proof, RESOURCE_EXHAUSTED above a limit, INTERNAL when the device cannot reach the
  // memory.
  absl::StatusOr<AddedRegion> Add(const RegionOwner& owner, int fd, uint64_t size,
                                  absl::string_view proof);
  void Close(const std::shared_ptr<SharedSession>& session);

  // Gives `memory` the regions that a call names, and the places of those of its tensors that lie
  // there. Errors: FAILED_PRECONDITION REGION_UNKNOWN, INVALID_ARGUMENT naming the field.
  absl::Status Find(const SharedRequest& request, absl::Span<const TensorSpec> tensors,
                    absl::string_view caller, bool unix_socket, CallMemory& memory);
  // Those of a decoded call of attention, if it names any.
  absl::Status FindFor(const AttentionCall& call, absl::string_view caller, bool unix_socket,
                       CallMemory& memory);

  // A copy of one tensor that the call names, which its owner may go on writing. Errors: FindFor's.
  absl::StatusOr<std::string> Copy(const SharedRequest& request, const TensorSpec& tensor,
                                   absl::string_view caller, bool unix_socket);

  SharedMemoryUse Use() const;

 private:
  using RegionList = std::vector<std::shared_ptr<MappedRegion>>;  // shared with the table
  absl::StatusOr<RegionList> RegionsOf(const SharedRequest& request, absl::string_view caller,
                                       bool unix_socket);
  using Regions = absl::flat_hash_map<std::string, std::shared_ptr<MappedRegion>>;

  Backend& backend_;
  const bool kept_outputs_;
  const std::shared_ptr<RegionLedger> ledger_;  // shared with every region
  mutable absl::Mutex mutex_;
  Regions regions_ ABSL_GUARDED_BY(mutex_);  // shared with the calls that use them
};

}  // namespace attnd
