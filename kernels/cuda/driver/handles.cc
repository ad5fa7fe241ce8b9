#include "kernels/cuda/driver/handles.h"

#include <cstring>

#include "base/status_macros.h"

namespace attnd {

absl::StatusOr<Context> Context::Retain(const Driver& driver, int ordinal) {
  const DriverFunctions& f = driver.functions();
  Context context;
  RETURN_IF_ERROR(driver.Check(f.device_get(&context.device_, ordinal), "cuDeviceGet"));
  RETURN_IF_ERROR(driver.Check(f.primary_context_retain(&context.context_, context.device_),
                               "cuDevicePrimaryCtxRetain"));
  context.driver_ = &driver;
  RETURN_IF_ERROR(context.MakeCurrent());
  return context;
}

Context::~Context() {
  if (driver_ != nullptr) driver_->functions().primary_context_release(device_);
}

absl::Status Context::MakeCurrent() const {
  return driver_->Check(driver_->functions().context_set_current(context_), "cuCtxSetCurrent");
}

absl::Status Context::Synchronize() const {
  return driver_->Check(driver_->functions().context_synchronize(), "cuCtxSynchronize");
}

absl::StatusOr<std::pair<int64_t, int64_t>> Context::MemoryInfo() const {
  size_t free_bytes = 0, total = 0;
  RETURN_IF_ERROR(
      driver_->Check(driver_->functions().memory_get_info(&free_bytes, &total), "cuMemGetInfo"));
  return std::pair(static_cast<int64_t>(free_bytes), static_cast<int64_t>(total));
}

absl::StatusOr<Event> Event::Create(const Driver& driver, bool timed) {
  CUevent raw = nullptr;
  unsigned flags = timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
  RETURN_IF_ERROR(driver.Check(driver.functions().event_create(&raw, flags), "cuEventCreate"));
  Event event;
  event.handle_ = {driver, raw};
  return event;
}

absl::StatusOr<bool> Event::HasPassed() const {
  const Driver& driver = handle_.driver();
  CUresult result = driver.functions().event_query(raw());
  if (result == CUDA_ERROR_NOT_READY) return false;
  RETURN_IF_ERROR(driver.Check(result, "cuEventQuery"));
  return true;
}

absl::StatusOr<double> Event::SecondsSince(const Event& start) const {
  const Driver& driver = handle_.driver();
  float milliseconds = 0;
  RETURN_IF_ERROR(
      driver.Check(driver.functions().event_elapsed_time(&milliseconds, start.raw(), raw()),
                   "cuEventElapsedTime"));
  return milliseconds * 1e-3;
}

absl::StatusOr<PinnedMemory> PinnedMemory::Allocate(const Driver& driver, int64_t bytes) {
  void* raw = nullptr;
  RETURN_IF_ERROR(driver.Check(
      driver.functions().host_allocate(&raw, static_cast<size_t>(bytes), CU_MEMHOSTALLOC_PORTABLE),
      "cuMemHostAlloc"));
  PinnedMemory memory;
  memory.handle_ = {driver, raw};
  memory.bytes_ = bytes;
  return memory;
}

absl::StatusOr<PinnedRange> PinnedRange::Register(const Driver& driver,
                                                  absl::Span<std::byte> memory) {
  RETURN_IF_ERROR(driver.Check(
      driver.functions().host_register(memory.data(), memory.size(), CU_MEMHOSTREGISTER_PORTABLE),
      "cuMemHostRegister"));
  PinnedRange range;
  range.handle_ = {driver, memory.data()};
  return range;
}

absl::StatusOr<Module> Module::Load(const Driver& driver, const void* image) {
  CUmodule raw = nullptr;
  RETURN_IF_ERROR(
      driver.Check(driver.functions().module_load_data(&raw, image), "cuModuleLoadData"));
  Module module;
  module.handle_ = {driver, raw};
  return module;
}

absl::StatusOr<CUfunction> Module::Function(const char* name) const {
  const Driver& driver = handle_.driver();
  CUfunction function = nullptr;
  RETURN_IF_ERROR(
      driver.Check(driver.functions().module_get_function(&function, handle_.raw(), name),
                   "cuModuleGetFunction"));
  return function;
}

absl::Status AllowDynamicShared(const Driver& driver, CUfunction function, int64_t bytes) {
  return driver.Check(
      driver.functions().function_set_attribute(
          function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(bytes)),
      "cuFuncSetAttribute");
}

absl::StatusOr<TensorMap> EncodeTensorMap(const Driver& driver, const RowsBox& box) {
  constexpr cuuint32_t kDimensions = 4, kBoxColumns = 64;
  const cuuint64_t extents[] = {
      static_cast<cuuint64_t>(box.columns), static_cast<cuuint64_t>(box.rows),
      static_cast<cuuint64_t>(box.heads), static_cast<cuuint64_t>(box.entries)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(box.row_bytes),
                                static_cast<cuuint64_t>(box.head_bytes),
                                static_cast<cuuint64_t>(box.entry_bytes)};
  const cuuint32_t sizes[] = {kBoxColumns, static_cast<cuuint32_t>(box.box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  RETURN_IF_ERROR(driver.Check(
      driver.functions().tensor_map_encode(
          &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kDimensions, reinterpret_cast<void*>(box.address),
          extents, strides, sizes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "cuTensorMapEncodeTiled"));
  TensorMap encoded;
  static_assert(sizeof(map) == sizeof(encoded));
  std::memcpy(&encoded, &map, sizeof(map));
  return encoded;
}

absl::Status StreamRef::CopyIn(DeviceAddress to, const void* from, int64_t bytes) const {
  return driver_->Check(
      driver_->functions().copy_to_device(to.value, from, static_cast<size_t>(bytes), stream_),
      "cuMemcpyHtoDAsync");
}

absl::Status StreamRef::CopyOut(void* to, DeviceAddress from, int64_t bytes) const {
  return driver_->Check(
      driver_->functions().copy_to_host(to, from.value, static_cast<size_t>(bytes), stream_),
      "cuMemcpyDtoHAsync");
}

absl::Status StreamRef::CopyRowsIn(DeviceAddress to, const void* from, const Rows& rows) const {
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = from;
  copy.srcPitch = static_cast<size_t>(rows.host_pitch);
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = to.value;
  copy.dstPitch = static_cast<size_t>(rows.device_pitch);
  copy.WidthInBytes = static_cast<size_t>(rows.bytes);
  copy.Height = static_cast<size_t>(rows.count);
  return driver_->Check(driver_->functions().copy_rows(&copy, stream_), "cuMemcpy2DAsync");
}

absl::Status StreamRef::CopyRowsOut(void* to, DeviceAddress from, const Rows& rows) const {
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from.value;
  copy.srcPitch = static_cast<size_t>(rows.device_pitch);
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = to;
  copy.dstPitch = static_cast<size_t>(rows.host_pitch);
  copy.WidthInBytes = static_cast<size_t>(rows.bytes);
  copy.Height = static_cast<size_t>(rows.count);
  return driver_->Check(driver_->functions().copy_rows(&copy, stream_), "cuMemcpy2DAsync");
}

absl::Status StreamRef::SetZero(DeviceAddress at, int64_t bytes) const {
  return driver_->Check(
      driver_->functions().set_bytes(at.value, 0, static_cast<size_t>(bytes), stream_),
      "cuMemsetD8Async");
}

absl::Status StreamRef::Record(const Event& event) const {
  return driver_->Check(driver_->functions().event_record(event.raw(), stream_), "cuEventRecord");
}

absl::Status StreamRef::Wait(const Event& event) const {
  return driver_->Check(driver_->functions().stream_wait_event(stream_, event.raw(), 0),
                        "cuStreamWaitEvent");
}

absl::Status StreamRef::Synchronize() const {
  return driver_->Check(driver_->functions().stream_synchronize(stream_), "cuStreamSynchronize");
}

absl::Status StreamRef::Launch(CUfunction function, Grid grid,
                               absl::Span<void* const> arguments) const {
  if (grid.overlaps) return LaunchOverlapping(function, grid, arguments);
  return driver_->Check(driver_->functions().launch_kernel(
                            function, grid.blocks, 1, 1, grid.threads, 1, 1, grid.shared_bytes,
                            stream_, const_cast<void**>(arguments.data()), nullptr),
                        "cuLaunchKernel");
}

absl::Status StreamRef::LaunchOverlapping(CUfunction function, const Grid& grid,
                                          absl::Span<void* const> arguments) const {
  CUlaunchAttribute overlap = {};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config = {};
  config.gridDimX = grid.blocks;
  config.blockDimX = grid.threads;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = grid.shared_bytes;
  config.hStream = stream_;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return driver_->Check(driver_->functions().launch_with_attributes(
                            &config, function, const_cast<void**>(arguments.data()), nullptr),
                        "cuLaunchKernelEx");
}

absl::StatusOr<Stream> Stream::Create(const Driver& driver) {
  CUstream raw = nullptr;
  RETURN_IF_ERROR(driver.Check(driver.functions().stream_create(&raw, CU_STREAM_NON_BLOCKING),
                               "cuStreamCreate"));
  Stream stream;
  stream.handle_ = {driver, raw};
  return stream;
}

}  // namespace attnd
