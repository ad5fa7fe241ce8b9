#include "client/call/shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/free_ranges.h"
#include "base/round_up.h"
#include "net/descriptor_socket.h"
#include "proto/attnd/v1/shared_memory.pb.h"

namespace attnd {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kRegionUnit = int64_t{2} << 20;
constexpr int64_t kSmallestRegion = int64_t{64} << 20;
constexpr size_t kProofBytes = 16;
// How long without a daemon's socket before the next look, and how long a daemon may think.
constexpr absl::Duration kTryAgain = absl::Seconds(5);
constexpr absl::Duration kPatience = absl::Seconds(5);

// The next reply, or nothing when the daemon is gone or silent.
std::optional<v1::SharedMemoryReply> Receive(int link, absl::Time until) {
  pollfd polled = {link, POLLIN, 0};
  int milliseconds = static_cast<int>(absl::ToInt64Milliseconds(until - SteadyNow()));
  if (poll(&polled, 1, std::max(milliseconds, 0)) != 1) return std::nullopt;
  Packet packet;
  v1::SharedMemoryReply reply;
  if (ReceivePacket(link, false, packet) != SocketResult::kDone ||
      !reply.ParseFromString(packet.bytes)) {
    return std::nullopt;
  }
  return reply;
}

}  // namespace

// One memfd, mapped. The first page holds the proofs.
class ClientRegion {
 public:
  // Null when there is no memory.
  static std::shared_ptr<ClientRegion> Make(int64_t bytes, FileDescriptor& fd) {
    fd = FileDescriptor(memfd_create("attnd", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    // All of it now: later a page that cannot be had would be a SIGBUS.
    if (!fd.valid() || ftruncate(fd.get(), bytes) != 0 || fallocate(fd.get(), 0, 0, bytes) != 0 ||
        fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
      return nullptr;
    }
    void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_POPULATE, fd.get(), 0);
    if (data == MAP_FAILED) return nullptr;
    return std::shared_ptr<ClientRegion>(new ClientRegion(static_cast<std::byte*>(data), bytes));
  }
  ~ClientRegion() { munmap(data_, static_cast<size_t>(size_)); }

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  const std::string& token() const { return token_; }  // set before others see the region
  void set_token(std::string token) { token_ = std::move(token); }

  std::byte* Take(int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    std::optional<int64_t> offset = free_.Take(bytes);
    return offset.has_value() ? data_ + kPageBytes + *offset : nullptr;
  }
  void Give(std::byte* data, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    free_.Give(data - data_ - kPageBytes, bytes);
  }

 private:
  ClientRegion(std::byte* data, int64_t size)
      : data_(data), size_(size), free_(size - kPageBytes) {}

  std::byte* const data_;
  const int64_t size_;
  std::string token_;
  absl::Mutex mutex_;
  FreeRanges free_ ABSL_GUARDED_BY(mutex_);
};

SharedMemory::~SharedMemory() = default;

SharedMemory::Regions SharedMemory::Current() const {
  absl::MutexLock lock(&mutex_);
  return regions_;
}

std::shared_ptr<std::byte> SharedMemory::TakeFrom(const std::shared_ptr<ClientRegion>& region,
                                                  int64_t bytes) {
  std::byte* data = region->Take(bytes);
  if (data == nullptr) return nullptr;
  return std::shared_ptr<std::byte>(data,
                                    [region, bytes](std::byte* p) { region->Give(p, bytes); });
}

std::shared_ptr<std::byte> SharedMemory::Allocate(int64_t bytes) {
  bytes = RoundUp(std::max<int64_t>(bytes, 1), kAlignment);
  auto take = [&]() -> std::shared_ptr<std::byte> {
    for (const auto& region : Current()) {
      if (auto block = TakeFrom(region, bytes)) return block;
    }
    return nullptr;
  };
  if (auto block = take()) return block;
  absl::MutexLock lock(&link_mutex_);
  if (auto block = take()) return block;  // another thread has added a region meanwhile
  std::shared_ptr<ClientRegion> region = AddRegion(bytes);
  return region == nullptr ? nullptr : TakeFrom(region, bytes);
}

std::optional<SharedPlaceOf> SharedMemory::Find(const void* data, int64_t bytes) const {
  const auto* first = static_cast<const std::byte*>(data);
  absl::MutexLock lock(&mutex_);
  for (const auto& region : regions_) {
    std::less_equal<const std::byte*> before;
    if (!before(region->data(), first) || !before(first + bytes, region->data() + region->size())) {
      continue;
    }
    auto offset = static_cast<uint64_t>(first - region->data());
    if (offset % kAlignment != 0) return std::nullopt;
    return SharedPlaceOf{region->token(), offset};
  }
  return std::nullopt;
}

bool SharedMemory::takes_kept_outputs() const {
  absl::MutexLock lock(&mutex_);
  return takes_kept_outputs_;
}

bool SharedMemory::takes_modules() const {
  absl::MutexLock lock(&mutex_);
  return takes_modules_;
}

uint64_t SharedMemory::NewUse() {
  absl::MutexLock lock(&mutex_);
  return ++last_use_;
}

bool SharedMemory::Connect() {
  if (link_.valid()) return true;
  if (SteadyNow() < try_again_) return false;
  try_again_ = SteadyNow() + kTryAgain;
  std::string path = absl::StrCat(path_, ".shm");
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  memcpy(address.sun_path, path.data(), path.size());
  FileDescriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid() ||
      connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return false;
  }
  link_ = std::move(fd);
  return true;
}

std::shared_ptr<ClientRegion> SharedMemory::AddRegion(int64_t bytes) {
  int64_t shared = 0;
  for (const auto& region : Current()) shared += region->size();
  int64_t left = (max_bytes_ - shared) / kRegionUnit * kRegionUnit;
  int64_t needed = RoundUp(bytes + kPageBytes, kRegionUnit);
  // The more there is the more is likely to be wanted: few regions, few requests.
  int64_t size =
      std::min(std::max({needed, kSmallestRegion, shared / 2 / kRegionUnit * kRegionUnit}),
               std::max(needed, left));
  if (size > left || !Connect()) return nullptr;
  FileDescriptor fd;
  std::shared_ptr<ClientRegion> region = ClientRegion::Make(size, fd);
  char proof[kProofBytes];
  if (region == nullptr || getrandom(proof, sizeof(proof), 0) != sizeof(proof)) return nullptr;
  memcpy(region->data(), proof, sizeof(proof));
  v1::SharedMemoryRequest request;
  request.mutable_add_region()->set_size(static_cast<uint64_t>(size));
  request.mutable_add_region()->set_proof(proof, sizeof(proof));
  request.mutable_add_region()->set_authorization(authorization_);
  std::optional<v1::SharedMemoryReply> reply;
  if (SendPacket(link_.get(), request.SerializeAsString(), fd.get(), false) ==
      SocketResult::kDone) {
    reply = Receive(link_.get(), SteadyNow() + kPatience);
  }
  // Gone, or another memory than ours: a daemon that is not what it seems to be.
  if (!reply.has_value() || (reply->error().empty() &&
                             (reply->proof().size() != kProofBytes ||
                              memcmp(region->data(), reply->proof().data(), kProofBytes) != 0))) {
    Drop();
    return nullptr;
  }
  if (!reply->error().empty()) return nullptr;
  region->set_token(reply->region());
  absl::MutexLock lock(&mutex_);
  regions_.push_back(region);
  takes_kept_outputs_ = reply->kept_outputs();
  takes_modules_ = reply->modules();
  return region;
}

void SharedMemory::EndUse(uint64_t use) {
  absl::MutexLock lock(&link_mutex_);
  if (!link_.valid()) return;
  v1::SharedMemoryRequest request;
  request.mutable_end_use()->set_use(use);
  absl::Time until = SteadyNow() + kPatience;
  std::optional<v1::SharedMemoryReply> reply;
  if (SendPacket(link_.get(), request.SerializeAsString(), -1, false) == SocketResult::kDone) {
    do {
      reply = Receive(link_.get(), until);
    } while (reply.has_value() && reply->ended_use() != use);
  }
  if (!reply.has_value()) Drop();
}

void SharedMemory::Forget() {
  absl::MutexLock lock(&link_mutex_);
  Drop();
}

void SharedMemory::Drop() {
  link_ = FileDescriptor();
  try_again_ = SteadyNow() + kTryAgain;
  absl::MutexLock lock(&mutex_);
  regions_.clear();
  takes_kept_outputs_ = takes_modules_ = false;
}

}  // namespace attnd
