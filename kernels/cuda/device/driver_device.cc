#include "kernels/cuda/device/driver_device.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "kernels/cuda/device/arena_bytes.h"
#include "kernels/cuda/device/device_wait.h"
#include "kernels/cuda/device/driver_stream.h"
#include "kernels/cuda/device/launch_slot.h"
#include "kernels/cuda/device/launch_turns.h"
#include "kernels/cuda/device/pinned_piece.h"
#include "kernels/cuda/driver/memory_pool.h"
#include "kernels/cuda/library/embedded_kernels.h"
#include "kernels/cuda/library/kernel_library.h"

namespace attnd::cuda {
namespace {

// Launches may hold this share of the pool, and masks that one: the rest is for rounding and for
// gaps between them.
constexpr double kLaunchShare = 0.88, kMaskShare = 0.02;

class DriverDevice final : public KernelDevice {
 public:
  static absl::StatusOr<std::unique_ptr<DriverDevice>> Make(const DriverDeviceOptions& options) {
    auto device = std::unique_ptr<DriverDevice>(new DriverDevice(options));
    RETURN_IF_ERROR(device->Start());
    return device;
  }
  ~DriverDevice() override {
    // Members free device memory: their context must be this thread's.
    if (context_) context_.MakeCurrent().IgnoreError();
  }

  const BackendInfo& info() const override { return info_; }
  std::string Versions() const override {
    return absl::StrCat("driver ", driver_->version(), ", kernels ", library_->Checksum());
  }
  int multiprocessors() const override { return multiprocessors_; }
  const std::vector<KernelRow>& rows() const override { return rows_; }
  absl::StatusOr<TensorMap> Encode(const RowsBox& box) const override {
    return EncodeTensorMap(*driver_, box);
  }
  absl::Status Check(const KernelRow& row) const override {
    absl::MutexLock lock(&library_mutex_);
    return library_->Check(row);
  }
  absl::StatusOr<std::unique_ptr<DeviceLaunch>> Begin(int64_t bytes,
                                                      absl::Span<const Region> regions) override;
  absl::StatusOr<std::unique_ptr<DeviceLaunch>> BeginIn(const DevicePart& arena,
                                                        absl::Span<const Region> regions) override;
  std::unique_ptr<DeviceMemory> Hold(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<DeviceStream>> MakeStream() override {
    RETURN_IF_ERROR(Seen(context_.MakeCurrent()));
    return DriverStream::Make(*driver_, context_,
                              [this](absl::Status status) { return Seen(std::move(status)); });
  }
  absl::Status RegisterHost(absl::Span<std::byte> memory) override {
    RETURN_IF_ERROR(context_.MakeCurrent());
    ASSIGN_OR_RETURN(PinnedRange range, PinnedRange::Register(*driver_, memory));
    absl::MutexLock lock(&mutex_);
    pinned_[memory.data()] = std::make_unique<Pinned>(std::move(range), memory);
    return absl::OkStatus();
  }
  void UnregisterHost(absl::Span<std::byte> memory) override {
    if (!context_.MakeCurrent().ok()) return;
    absl::MutexLock lock(&mutex_);
    pinned_.erase(memory.data());
  }
  double max_slice_seconds() const override { return options_.max_slice_seconds; }
  int64_t mask_bytes() const override { return mask_bytes_; }
  DeviceUse use() const override;

 private:
  friend class DriverLaunch;
  friend class HeldBlock;
  struct Pinned {
    Pinned(PinnedRange locked, absl::Span<std::byte> memory)
        : range(std::move(locked)), piece(memory) {}
    PinnedRange range;
    PinnedPiece piece;
  };
  explicit DriverDevice(const DriverDeviceOptions& options) : options_(options) {}
  absl::Status Start();
  absl::Status StartMemory();
  absl::Status LoadKernels();
  void Describe(const DeviceIdentity& identity);

  // Passes a status on; one that means a lost context is remembered and marked.
  absl::Status Seen(absl::Status status) {
    if (IsSticky(status)) status = DeviceLost(std::move(status));
    if (IsDeviceLost(status)) lost_ = true;
    return status;
  }
  absl::StatusOr<LoadedKernel> Kernel(const KernelRow& row) {
    absl::MutexLock lock(&library_mutex_);
    return library_->Get(row);
  }
  // Waits until a slot and memory are there.
  absl::StatusOr<std::pair<LaunchSlot*, PoolBlock>> Take(int64_t bytes);
  LaunchSlot* TakeSlot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    auto slot_free = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !free_slots_.empty(); };
    mutex_.Await(absl::Condition(&slot_free));
    LaunchSlot* slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
  // `slot`: null for what no launch holds.
  void GiveBack(LaunchSlot* slot, PoolBlock block, const ArenaBytes& use);
  void CountUse(const ArenaBytes& use, int sign);
  // Whether rows begin and end in page-locked memory of different pieces, or in one and outside. To
  // the driver the last row is as long as rows lie apart.
  static bool CrossesPinnedMemory(const HostCopy& copy) {
    const std::byte* const last = copy.host + copy.rows * copy.host_pitch - 1;
    return PinnedPiece::BeginOf(copy.host) != PinnedPiece::BeginOf(last);
  }

  const DriverDeviceOptions options_;
  // In the order in which they are needed: destroyed last to first.
  std::unique_ptr<Driver> driver_;
  Context context_;
  BackendInfo info_;
  std::vector<KernelRow> rows_;
  int64_t total_bytes_ = 0, mask_bytes_ = 0;
  int multiprocessors_ = 0;
  bool launches_overlap_ = false;  // ptx::WaitForLaunchBefore
  Stream upload_, compute_, download_;
  MemoryPool pool_;
  std::vector<LaunchSlot> slots_;
  mutable absl::Mutex library_mutex_;
  std::unique_ptr<KernelLibrary> library_;
  LaunchTurns turns_;
  absl::Mutex compute_mutex_;  // the kernels of a slice stand together
  absl::Mutex mutex_;
  std::vector<LaunchSlot*> free_slots_ ABSL_GUARDED_BY(mutex_);
  // That this device has locked, by where they begin.
  std::map<std::byte*, std::unique_ptr<Pinned>> pinned_ ABSL_GUARDED_BY(mutex_);
  uint64_t given_back_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<bool> lost_{false};
  std::atomic<int64_t> input_{0}, output_{0}, workspace_{0}, lease_{0}, peak_{0};
  std::atomic<int64_t> uploaded_{0}, downloaded_{0}, allocation_failures_{0};
  std::atomic<double> upload_seconds_{0}, kernel_seconds_{0}, download_seconds_{0};
};

// Holds what a call left behind. It was allocated on the upload stream and is given back there,
// when no launch that uses it is at work.
class HeldBlock final : public DeviceMemory {
 public:
  HeldBlock(DriverDevice& device, PoolBlock block) : device_(device), block_(std::move(block)) {
    device_.CountUse({.lease = block_.bytes()}, +1);
  }
  ~HeldBlock() override {
    device_.context_.MakeCurrent().IgnoreError();
    const ArenaBytes use = {.lease = block_.bytes()};
    device_.GiveBack(nullptr, std::move(block_), use);
  }
  uint64_t address() const override { return block_.address().value; }
  int64_t bytes() const override { return block_.bytes(); }

 private:
  DriverDevice& device_;
  PoolBlock block_;
};

class DriverLaunch final : public DeviceLaunch {
 public:
  // `arena`: the block's address, or a place in memory that is held, without a block.
  DriverLaunch(DriverDevice& device, LaunchSlot* slot, PoolBlock block, uint64_t arena,
               const ArenaBytes& use)
      : device_(device), slot_(slot), block_(std::move(block)), arena_(arena), use_(use) {}
  ~DriverLaunch() override {
    device_.context_.MakeCurrent().IgnoreError();
    // Nothing may be at work on this memory when it is given back; a lost device works no more. A
    // slice may have been enqueued in part.
    if (begun_ > ended_) device_.compute_.ref().Record(SliceAt(begun_ - 1).end).IgnoreError();
    if (!finished_) Settle().IgnoreError();
    while (begun_ > ended_) EndTurn();
    device_.GiveBack(slot_, std::move(block_), use_);
  }

  uint64_t arena() const override { return arena_; }

  absl::Status Upload(const HostCopy& copy) override {
    RETURN_IF_ERROR(BeginUpload());
    if (copy.rows > 1 && DriverDevice::CrossesPinnedMemory(copy)) {
      return EachRow(copy, [this](const HostCopy& row) { return Upload(row); });
    }
    uploaded_bytes_ += copy.total();
    return device_.Seen(copy.rows == 1 ? Up().CopyIn({copy.device}, copy.host, copy.bytes)
                                       : Up().CopyRowsIn({copy.device}, copy.host, RowsOf(copy)));
  }
  absl::Status UploadCopy(uint64_t to, const void* from, int64_t bytes) override;
  absl::Status SetZero(uint64_t at, int64_t bytes) override {
    RETURN_IF_ERROR(BeginUpload());
    return device_.Seen(Up().SetZero({at}, bytes));
  }
  absl::StatusOr<bool> Run(absl::Span<const KernelStep> steps,
                           const std::function<bool()>& wanted) override;
  absl::Status Download(const HostCopy& copy) override {
    RETURN_IF_ERROR(BeginDownload());
    if (copy.rows > 1 && DriverDevice::CrossesPinnedMemory(copy)) {
      return EachRow(copy, [this](const HostCopy& row) { return Download(row); });
    }
    downloaded_bytes_ += copy.total();
    return device_.Seen(copy.rows == 1
                            ? Down().CopyOut(copy.host, {copy.device}, copy.bytes)
                            : Down().CopyRowsOut(copy.host, {copy.device}, RowsOf(copy)));
  }
  absl::StatusOr<DeviceTimes> Finish() override;

 private:
  // One command reads (writes) one piece of page-locked memory.
  template <class Make>
  static absl::Status EachRow(const HostCopy& copy, const Make& make) {
    for (int64_t row = 0; row < copy.rows; ++row) {
      RETURN_IF_ERROR(make({.device = copy.device + static_cast<uint64_t>(row * copy.device_pitch),
                            .host = copy.host + row * copy.host_pitch,
                            .bytes = copy.bytes}));
    }
    return absl::OkStatus();
  }
  static StreamRef::Rows RowsOf(const HostCopy& copy) {
    return {copy.rows, copy.bytes, copy.host_pitch, copy.device_pitch};
  }
  StreamRef Up() const { return device_.upload_.ref(); }
  StreamRef Down() const { return device_.download_.ref(); }
  absl::Status BeginUpload();
  absl::Status EndUpload();
  const Event& UploadEnd() const {
    return begun_ == 0 ? slot_->upload_end : slot_->later_upload_end;
  }
  absl::Status BeginDownload();
  absl::Status TakeTurn();
  absl::Status Enqueue(absl::Span<const KernelStep> steps);
  absl::Status EnqueueStep(const KernelStep& step);
  absl::Status EndSlice();
  absl::Status Settle();
  absl::StatusOr<double> Elapsed(const Event& begin, const Event& end) {
    absl::StatusOr<double> seconds = end.SecondsSince(begin);
    if (!seconds.ok()) return device_.Seen(seconds.status());
    return seconds;
  }
  const LaunchSlot::Slice& SliceAt(int64_t number) const {
    return slot_->slices[static_cast<size_t>(number % LaunchTurns::kDepth)];
  }
  void EndTurn() {
    ++ended_;
    device_.turns_.Give();
  }

  DriverDevice& device_;
  LaunchSlot* const slot_;
  PoolBlock block_;
  const uint64_t arena_;
  const ArenaBytes use_;
  int64_t bounced_ = 0;  // bytes of the bounce memory in use
  int64_t uploaded_bytes_ = 0, downloaded_bytes_ = 0;
  DeviceTimes times_;
  // uploading_: since the last slice or UploadEnd; upload_is_at_work_: no slice waits for it yet.
  bool is_upload_counted_ = false, uploading_ = false, upload_is_at_work_ = false;
  int64_t downloaded_slices_ = -1;  // which the last download came after; -1: there is none
  int64_t begun_ = 0, ended_ = 0;  // slices: between them those that are enqueued, with a turn each
  bool finished_ = false;
};

absl::Status DriverLaunch::BeginUpload() {
  uploading_ = true;
  if (begun_ > 0 || std::exchange(is_upload_counted_, true)) return absl::OkStatus();
  return device_.Seen(Up().Record(slot_->upload_begin));
}

// The time of bytes that go up after the first slice is not counted: kernels run meanwhile.
absl::Status DriverLaunch::EndUpload() {
  uploading_ = false;
  upload_is_at_work_ = true;
  return device_.Seen(Up().Record(UploadEnd()));
}

absl::Status DriverLaunch::UploadCopy(uint64_t to, const void* from, int64_t bytes) {
  const auto* next = static_cast<const std::byte*>(from);
  for (int64_t left = bytes; left > 0;) {
    if (bounced_ == kBounceBytes) {  // only for lists of tens of thousands of tiles
      RETURN_IF_ERROR(EndUpload());
      RETURN_IF_ERROR(device_.Seen(WaitFor(UploadEnd())));
      bounced_ = 0;
    }
    const int64_t size = std::min(left, kBounceBytes - bounced_);
    std::byte* place = slot_->bounce.bytes().data() + bounced_;
    std::memcpy(place, next, size);
    RETURN_IF_ERROR(Upload({.device = to, .host = place, .bytes = size}));
    // The next piece stands where a copy may begin.
    bounced_ = std::min(kBounceBytes, (bounced_ + size + 63) / 64 * 64);
    next += size;
    to += size;
    left -= size;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> DriverLaunch::Run(absl::Span<const KernelStep> steps,
                                       const std::function<bool()>& wanted) {
  if (uploading_) RETURN_IF_ERROR(EndUpload());
  RETURN_IF_ERROR(TakeTurn());
  const bool is_lost = device_.lost_;
  if (is_lost || !wanted()) {
    device_.turns_.Give();
    if (is_lost) return DeviceLost(absl::InternalError("the GPU was lost"));
    return false;
  }
  RETURN_IF_ERROR(device_.Seen(Enqueue(steps)));
  return true;
}

// Slices at work hold one each.
absl::Status DriverLaunch::TakeTurn() {
  if (begun_ - ended_ == LaunchTurns::kDepth) RETURN_IF_ERROR(EndSlice());
  if (begun_ > ended_ && device_.turns_.TryTake()) return absl::OkStatus();
  while (begun_ > ended_) RETURN_IF_ERROR(EndSlice());
  device_.turns_.Take();
  return absl::OkStatus();
}

absl::Status DriverLaunch::Enqueue(absl::Span<const KernelStep> steps) {
  StreamRef compute = device_.compute_.ref();
  absl::MutexLock lock(&device_.compute_mutex_);
  const Event& uploaded = UploadEnd();
  const LaunchSlot::Slice& slice = SliceAt(begun_++);
  if (std::exchange(upload_is_at_work_, false)) RETURN_IF_ERROR(compute.Wait(uploaded));
  RETURN_IF_ERROR(compute.Record(slice.begin));
  for (const KernelStep& step : steps) RETURN_IF_ERROR(EnqueueStep(step));
  return compute.Record(slice.end);
}

absl::Status DriverLaunch::EnqueueStep(const KernelStep& step) {
  StreamRef compute = device_.compute_.ref();
  if (device_.options_.stand_in) {
    ASSIGN_OR_RETURN(const bool replaced,
                     device_.options_.stand_in(*device_.driver_, compute, step));
    if (replaced) return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(LoadedKernel kernel, device_.Kernel(step.row));
  LaunchParams params = step.params;
  void* arguments[] = {&params};
  const int at_once = device_.multiprocessors_ * step.row.tile.blocks_per_sm;
  const int blocks = step.row.stays ? std::min(params.tile_count, at_once) : params.tile_count;
  return compute.Launch(kernel.function,
                        {.blocks = static_cast<uint32_t>(blocks),
                         .threads = static_cast<uint32_t>(kernel.threads),
                         .shared_bytes = static_cast<uint32_t>(kernel.shared_bytes),
                         .overlaps = device_.launches_overlap_},
                        arguments);
}

// Waits for the first slice at work and lets the next launch have its turn.
absl::Status DriverLaunch::EndSlice() {
  const LaunchSlot::Slice& slice = SliceAt(ended_);
  absl::Status status = device_.Seen(WaitFor(slice.end));
  EndTurn();
  RETURN_IF_ERROR(status);
  ASSIGN_OR_RETURN(const double seconds, Elapsed(slice.begin, slice.end));
  times_.kernel += seconds;
  return absl::OkStatus();
}

absl::Status DriverLaunch::BeginDownload() {
  if (std::exchange(downloaded_slices_, begun_) == begun_) return absl::OkStatus();
  if (begun_ > 0) RETURN_IF_ERROR(device_.Seen(Down().Wait(SliceAt(begun_ - 1).end)));
  return device_.Seen(Down().Record(slot_->download_begin));
}

// Waits until nothing of this launch is at work.
absl::Status DriverLaunch::Settle() {
  if (uploading_) RETURN_IF_ERROR(EndUpload());
  if (upload_is_at_work_) RETURN_IF_ERROR(device_.Seen(WaitFor(UploadEnd())));
  while (begun_ > ended_) RETURN_IF_ERROR(EndSlice());
  if (downloaded_slices_ >= 0) {
    RETURN_IF_ERROR(device_.Seen(Down().Record(slot_->download_end)));
    return device_.Seen(WaitFor(slot_->download_end));
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceTimes> DriverLaunch::Finish() {
  RETURN_IF_ERROR(Settle());
  finished_ = true;
  if (is_upload_counted_) {
    ASSIGN_OR_RETURN(times_.upload, Elapsed(slot_->upload_begin, slot_->upload_end));
  }
  if (downloaded_slices_ >= 0 && downloaded_slices_ == begun_) {
    ASSIGN_OR_RETURN(times_.download, Elapsed(slot_->download_begin, slot_->download_end));
  }
  device_.uploaded_ += uploaded_bytes_;
  device_.downloaded_ += downloaded_bytes_;
  device_.upload_seconds_ += times_.upload;
  device_.kernel_seconds_ += times_.kernel;
  device_.download_seconds_ += times_.download;
  return times_;
}

absl::StatusOr<std::unique_ptr<DeviceLaunch>> DriverDevice::Begin(
    int64_t bytes, absl::Span<const Region> regions) {
  RETURN_IF_ERROR(Seen(context_.MakeCurrent()));
  auto taken = Take(bytes);
  if (!taken.ok()) return Seen(taken.status());
  const ArenaBytes use = BytesByUse(bytes, regions);
  CountUse(use, +1);
  const uint64_t arena = taken->second.address().value;
  return std::make_unique<DriverLaunch>(*this, taken->first, std::move(taken->second), arena, use);
}

absl::StatusOr<std::unique_ptr<DeviceLaunch>> DriverDevice::BeginIn(const DevicePart& arena,
                                                                    absl::Span<const Region>) {
  RETURN_IF_ERROR(Seen(context_.MakeCurrent()));
  absl::MutexLock lock(&mutex_);
  return std::make_unique<DriverLaunch>(*this, TakeSlot(), PoolBlock(), arena.address(),
                                        ArenaBytes());
}

absl::StatusOr<std::pair<LaunchSlot*, PoolBlock>> DriverDevice::Take(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  while (true) {
    auto slot_free = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !free_slots_.empty(); };
    mutex_.Await(absl::Condition(&slot_free));
    absl::StatusOr<PoolBlock> block = pool_.Allocate(upload_.ref(), bytes);
    if (block.ok()) {
      LaunchSlot* slot = free_slots_.back();
      free_slots_.pop_back();
      return std::pair(slot, *std::move(block));
    }
    ++allocation_failures_;
    const bool alone = free_slots_.size() == slots_.size();
    if (alone || block.status().code() != absl::StatusCode::kResourceExhausted) {
      return block.status();
    }
    auto changed = [this, seen = given_back_]()
                       ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return given_back_ != seen; };
    mutex_.Await(absl::Condition(&changed));
  }
}

std::unique_ptr<DeviceMemory> DriverDevice::Hold(int64_t bytes) {
  if (lost_ || !Seen(context_.MakeCurrent()).ok()) return nullptr;
  absl::MutexLock lock(&mutex_);
  absl::StatusOr<PoolBlock> block = pool_.Allocate(upload_.ref(), bytes);
  if (!Seen(block.status()).ok()) {
    ++allocation_failures_;
    return nullptr;
  }
  return std::make_unique<HeldBlock>(*this, *std::move(block));
}

void DriverDevice::GiveBack(LaunchSlot* slot, PoolBlock block, const ArenaBytes& use) {
  CountUse(use, -1);
  absl::MutexLock lock(&mutex_);
  { PoolBlock gone = std::move(block); }
  if (slot != nullptr) free_slots_.push_back(slot);
  ++given_back_;
}

void DriverDevice::CountUse(const ArenaBytes& use, int sign) {
  input_ += sign * use.input;
  output_ += sign * use.output;
  workspace_ += sign * use.workspace;
  lease_ += sign * use.lease;
  const int64_t now = input_ + output_ + workspace_ + lease_;
  for (int64_t old = peak_; now > old && !peak_.compare_exchange_weak(old, now);) {
  }
}

DeviceUse DriverDevice::use() const {
  DeviceUse use;
  use.memory_total_bytes = total_bytes_;
  if (context_.MakeCurrent().ok()) {
    use.memory_reserved_bytes = pool_.ReservedBytes().value_or(0);
    const auto memory = context_.MemoryInfo();
    if (memory.ok()) use.memory_used_bytes = memory->second - memory->first;
  }
  const PoolMap::Free free = pool_.map().FreeMemory();
  use.memory_free_bytes = free.bytes;
  use.memory_largest_free_bytes = free.largest;
  use.allocations = pool_.map().allocations();
  use.allocation_failures = allocation_failures_;
  use.memory_peak_bytes = peak_;
  use.input_bytes = input_;
  use.output_bytes = output_;
  use.workspace_bytes = workspace_;
  use.lease_bytes = lease_;
  use.uploaded_bytes = uploaded_;
  use.downloaded_bytes = downloaded_;
  use.upload_seconds = upload_seconds_;
  use.kernel_seconds = kernel_seconds_;
  use.download_seconds = download_seconds_;
  return use;
}

absl::Status DriverDevice::Start() {
  ASSIGN_OR_RETURN(driver_, Driver::Load(options_.driver_library));
  ASSIGN_OR_RETURN(const int count, driver_->DeviceCount());
  if (options_.ordinal < 0 || options_.ordinal >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("device ", options_.ordinal, ": the driver sees ", count,
                     " GPUs; name others in --devices, or look at CUDA_VISIBLE_DEVICES"));
  }
  ASSIGN_OR_RETURN(const DeviceIdentity identity, driver_->Identify(options_.ordinal));
  rows_ = KernelRowsOfGpu(identity.major * 10 + identity.minor);
  if (rows_.empty() || !identity.has_memory_pools) {
    const int least = Architectures().front().compute_capability;
    return absl::FailedPreconditionError(absl::StrCat(
        identity.name, " has compute capability ", identity.major, ".", identity.minor,
        identity.has_memory_pools ? "" : " and no memory pools",
        "; the cuda engine needs at least ", least / 10, ".", least % 10, " and memory pools"));
  }
  ASSIGN_OR_RETURN(context_, Context::Retain(*driver_, options_.ordinal));
  ASSIGN_OR_RETURN(upload_, Stream::Create(*driver_));
  ASSIGN_OR_RETURN(compute_, Stream::Create(*driver_));
  ASSIGN_OR_RETURN(download_, Stream::Create(*driver_));
  ASSIGN_OR_RETURN(library_, KernelLibrary::Create(
                                 *driver_, identity.major, identity.minor, EmbeddedKernelArchives(),
                                 {.cache_directory = options_.kernel_cache,
                                  .shared_bytes_per_block = identity.shared_bytes_per_block}));
  Describe(identity);
  RETURN_IF_ERROR(LoadKernels());
  return StartMemory();
}

void DriverDevice::Describe(const DeviceIdentity& identity) {
  info_.backend = "cuda";
  info_.device = identity.name;
  info_.architecture = absl::StrCat("sm_", identity.major, identity.minor);
  info_.uuid = identity.uuid;
  info_.ordinal = options_.ordinal;
  info_.pci_bus_id = identity.pci_bus_id;
  info_.launches = options_.launches;
  total_bytes_ = identity.memory_bytes;
  multiprocessors_ = identity.multiprocessors;
  launches_overlap_ = 10 * identity.major + identity.minor >= kOverlappingLaunches;
  // Operations a clock of each multiprocessor's tensor cores, half of them reached: 1024 of Volta's
  // and of those of gaming GPUs, 2048 of the A100's, 4096 of the H100's.
  const double operations = identity.major == 9                          ? 4096
                            : identity.major == 8 && identity.minor == 0 ? 2048
                                                                         : 1024;
  info_.flops_per_second = 0.5 * operations * identity.multiprocessors * 1e3 * identity.clock_khz;
}

// A module is loaded with memory and a wait of its own: never on the way of a request.
absl::Status DriverDevice::LoadKernels() {
  for (const KernelRow& row : rows_) {
    if (!Check(row).ok()) continue;
    const absl::Status status = Kernel(row).status();
    if (!absl::IsUnimplemented(status)) RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

absl::Status DriverDevice::StartMemory() {
  ASSIGN_OR_RETURN(const auto memory, context_.MemoryInfo());
  const auto [free_bytes, total] = memory;
  const auto wanted =
      static_cast<int64_t>(static_cast<double>(free_bytes) * options_.memory_fraction) >> 21 << 21;
  absl::StatusOr<MemoryPool> pool =
      MemoryPool::Create(*driver_, options_.ordinal, wanted, upload_.ref());
  if (!pool.ok() && pool.status().code() == absl::StatusCode::kResourceExhausted) {
    return absl::FailedPreconditionError(
        absl::StrCat(info_.device, " ", options_.ordinal, " is busy: cannot take ", wanted >> 20,
                     " MiB of its ", total >> 20, " MiB, ", free_bytes >> 20,
                     " MiB are free; stop what else uses it, or lower --hbm_fraction"));
  }
  ASSIGN_OR_RETURN(pool_, std::move(pool));
  info_.memory_bytes = static_cast<int64_t>(static_cast<double>(wanted) * kLaunchShare);
  mask_bytes_ = static_cast<int64_t>(static_cast<double>(wanted) * kMaskShare);
  slots_.resize(options_.launches);
  absl::MutexLock lock(&mutex_);
  for (LaunchSlot& slot : slots_) {
    RETURN_IF_ERROR(slot.Start(*driver_));
    free_slots_.push_back(&slot);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int> CountDevices(const std::string& driver_library) {
  ASSIGN_OR_RETURN(std::unique_ptr<Driver> driver, Driver::Load(driver_library));
  return driver->DeviceCount();
}

absl::StatusOr<std::unique_ptr<KernelDevice>> MakeDriverDevice(const DriverDeviceOptions& options) {
  return DriverDevice::Make(options);
}

}  // namespace attnd::cuda
