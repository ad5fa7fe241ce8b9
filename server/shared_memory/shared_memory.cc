#include "server/shared_memory/shared_memory.h"

#include <sys/random.h>

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/shared_memory/shared_region.h"

namespace attnd {
namespace {

std::string RandomBytes(size_t size) {
  std::string bytes(size, '\0');
  CHECK(getrandom(bytes.data(), size, 0) == static_cast<ssize_t>(size));
  return bytes;
}

absl::Status UnknownRegion(absl::string_view what) {
  return Failure(absl::StatusCode::kFailedPrecondition, reason::kRegionUnknown,
                 absl::StrCat("shared_memory: ", what, "; send the tensors in the message"));
}

absl::Status BadOffset(absl::string_view expected, absl::string_view got) {
  return FieldError(reason::kBadField, "shared_memory.tensor.offset", expected, got);
}

bool Overlap(const TensorSpec& a, const TensorSpec& b) {
  return a.region != kNoRegion && a.region == b.region && a.offset < b.offset + b.bytes &&
         b.offset < a.offset + a.bytes;
}

absl::Status CheckOverlap(absl::Span<const TensorSpec> tensors) {
  for (const TensorSpec& a : tensors) {
    for (const TensorSpec& b : tensors) {
      if (&a == &b) break;
      if (a.role != TensorUse::kOutput && b.role != TensorUse::kOutput) continue;
      if (!Overlap(a, b)) continue;
      return BadOffset("an output that shares no byte with another tensor",
                       absl::StrCat(a.name, " over ", b.name));
    }
  }
  return absl::OkStatus();
}

}  // namespace

// The bytes shared now, in total and by each user. Any thread.
class RegionLedger {
 public:
  explicit RegionLedger(const SharedMemoryLimits& limits) : limits_(limits) {}

  absl::Status Take(uint32_t user_id, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    int64_t own = of_user_[user_id];
    if (bytes > limits_.max_bytes - use_.bytes || bytes > limits_.user_max_bytes - own) {
      if (own == 0) of_user_.erase(user_id);
      return absl::ResourceExhaustedError(absl::StrCat("size: at most ", limits_.user_max_bytes,
                                                       " bytes of one user and ", limits_.max_bytes,
                                                       " of all, got ", bytes, " more"));
    }
    Add(user_id, bytes, 1);
    return absl::OkStatus();
  }
  void Give(uint32_t user_id, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    Add(user_id, -bytes, -1);
  }
  SharedMemoryUse use() const {
    absl::MutexLock lock(&mutex_);
    return use_;
  }

 private:
  void Add(uint32_t user_id, int64_t bytes, int64_t regions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    use_.bytes += bytes;
    use_.regions += regions;
    int64_t& own = of_user_[user_id];
    own += bytes;
    if (own == 0) of_user_.erase(user_id);
  }

  const SharedMemoryLimits limits_;
  mutable absl::Mutex mutex_;
  SharedMemoryUse use_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint32_t, int64_t> of_user_ ABSL_GUARDED_BY(mutex_);
};

// A share of the ledger, the mapping, and its registration with the device; undone in reverse.
class MappedRegion {
 public:
  static absl::StatusOr<std::shared_ptr<MappedRegion>> Make(std::shared_ptr<RegionLedger> ledger,
                                                            Backend& backend,
                                                            const RegionOwner& owner, int fd,
                                                            int64_t size) {
    RETURN_IF_ERROR(ledger->Take(owner.user_id, size));
    std::shared_ptr<MappedRegion> region(new MappedRegion(std::move(ledger), backend, owner, size));
    ASSIGN_OR_RETURN(region->memory_, SharedRegion::Map(fd, size));
    RETURN_IF_ERROR(backend.RegisterHost(region->bytes()));
    region->registered_ = true;
    return region;
  }
  ~MappedRegion() {
    if (registered_) backend_.UnregisterHost(bytes());
    memory_.reset();
    ledger_->Give(owner_.user_id, size_);
  }

  absl::Span<std::byte> bytes() const {
    return absl::MakeSpan(memory_->data(), static_cast<size_t>(memory_->size()));
  }
  const RegionOwner& owner() const { return owner_; }

 private:
  MappedRegion(std::shared_ptr<RegionLedger> ledger, Backend& backend, const RegionOwner& owner,
               int64_t size)
      : ledger_(std::move(ledger)), backend_(backend), owner_(owner), size_(size) {}

  const std::shared_ptr<RegionLedger> ledger_;
  Backend& backend_;
  const RegionOwner owner_;
  const int64_t size_;
  std::unique_ptr<SharedRegion> memory_;
  bool registered_ = false;
};

namespace {

// Holds a session while a call uses its regions.
struct RegionUse {
  RegionUse(std::shared_ptr<SharedSession> of, uint64_t number)
      : session(std::move(of)), use(number) {}
  ~RegionUse() {
    regions.clear();
    session->Finish(use);
  }
  const std::shared_ptr<SharedSession> session;  // also the control connection's
  const uint64_t use;
  std::vector<std::shared_ptr<MappedRegion>> regions;  // also the table's
};

absl::StatusOr<std::byte*> PlaceIn(const MappedRegion& region, const TensorSpec& tensor) {
  uint64_t size = region.bytes().size(), bytes = static_cast<uint64_t>(tensor.bytes);
  if (tensor.offset <= size && bytes <= size - tensor.offset) {
    return region.bytes().data() + tensor.offset;
  }
  return BadOffset(absl::StrCat("at most ", size, " together with size"),
                   absl::StrCat(tensor.offset, " + ", tensor.bytes));
}

}  // namespace

SharedMemoryTable::SharedMemoryTable(const SharedMemoryLimits& limits, Backend& backend,
                                     bool kept_outputs)
    : backend_(backend),
      kept_outputs_(kept_outputs),
      ledger_(std::make_shared<RegionLedger>(limits)) {}
SharedMemoryTable::~SharedMemoryTable() = default;

absl::StatusOr<AddedRegion> SharedMemoryTable::Add(const RegionOwner& owner, int fd, uint64_t size,
                                                   absl::string_view proof) {
  if (size == 0 || size > uint64_t{1} << 46) {
    return absl::FailedPreconditionError(absl::StrCat("size: expected 4096..2^46, got ", size));
  }
  int64_t regions = 0;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [token, region] : regions_)
      regions += region->owner().session == owner.session;
  }
  if (regions >= kMaxRegionsOfSession) {
    return absl::ResourceExhaustedError(
        absl::StrCat("regions of one connection: at most ", kMaxRegionsOfSession));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<MappedRegion> region,
                   MappedRegion::Make(ledger_, backend_, owner, fd, static_cast<int64_t>(size)));
  std::byte* first = region->bytes().data();
  if (proof.size() != kSharedProofBytes || memcmp(first, proof.data(), kSharedProofBytes) != 0) {
    return absl::FailedPreconditionError(
        "proof: expected what stands in the first 16 bytes of the region, got something else");
  }
  AddedRegion added{RandomBytes(16), RandomBytes(kSharedProofBytes), kept_outputs_};
  memcpy(first, added.proof.data(), kSharedProofBytes);
  absl::MutexLock lock(&mutex_);
  regions_.emplace(added.token, std::move(region));
  return added;
}

void SharedMemoryTable::Close(const std::shared_ptr<SharedSession>& session) {
  session->Close();
  std::vector<std::shared_ptr<MappedRegion>> closed;  // dies after the lock: unmapping takes time
  absl::MutexLock lock(&mutex_);
  for (auto it = regions_.begin(); it != regions_.end();) {
    auto region = it++;
    if (region->second->owner().session != session) continue;
    closed.push_back(std::move(region->second));
    regions_.erase(region);
  }
}

absl::StatusOr<SharedMemoryTable::RegionList> SharedMemoryTable::RegionsOf(
    const SharedRequest& request, absl::string_view caller, bool unix_socket) {
  if (!unix_socket) return UnknownRegion("only in calls over the unix socket");
  RegionList regions;
  {
    absl::MutexLock lock(&mutex_);
    for (const std::string& token : request.regions) {
      auto found = regions_.find(token);
      if (found == regions_.end() || found->second->owner().caller != caller) {
        return UnknownRegion("region: not one of this caller's");
      }
      regions.push_back(found->second);
    }
  }
  for (const auto& region : regions) {
    if (region->owner().session != regions.front()->owner().session) {
      return UnknownRegion("region: of several connections");
    }
  }
  return regions;
}

absl::StatusOr<std::string> SharedMemoryTable::Copy(const SharedRequest& request,
                                                    const TensorSpec& tensor,
                                                    absl::string_view caller, bool unix_socket) {
  ASSIGN_OR_RETURN(const RegionList regions, RegionsOf(request, caller, unix_socket));
  ASSIGN_OR_RETURN(const std::byte* data, PlaceIn(*regions[tensor.region], tensor));
  return std::string(reinterpret_cast<const char*>(data), static_cast<size_t>(tensor.bytes));
}

absl::Status SharedMemoryTable::FindFor(const AttentionCall& call, absl::string_view caller,
                                        bool unix_socket, CallMemory& memory) {
  if (call.shared_request() == nullptr) return absl::OkStatus();
  return Find(*call.shared_request(), call.tensors(), caller, unix_socket, memory);
}

absl::Status SharedMemoryTable::Find(const SharedRequest& request,
                                     absl::Span<const TensorSpec> tensors, absl::string_view caller,
                                     bool unix_socket, CallMemory& memory) {
  ASSIGN_OR_RETURN(RegionList regions, RegionsOf(request, caller, unix_socket));
  RETURN_IF_ERROR(CheckOverlap(tensors));
  for (const TensorSpec& tensor : tensors) {
    if (tensor.region == kNoRegion) continue;
    ASSIGN_OR_RETURN(std::byte * data, PlaceIn(*regions[tensor.region], tensor));
    memory.shared.Add(tensor.id, data);
  }
  std::shared_ptr<SharedSession> session = regions.front()->owner().session;
  if (!session->Begin(request.use)) return UnknownRegion("use: has been ended, or runs");
  auto use = std::make_shared<RegionUse>(std::move(session), request.use);
  use->regions = std::move(regions);
  memory.regions = std::move(use);
  return absl::OkStatus();
}

SharedMemoryUse SharedMemoryTable::Use() const { return ledger_->use(); }

}  // namespace attnd
