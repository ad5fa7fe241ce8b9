// A stand-in for libcuda.so.1 (and, in the same file, libnvidia-ml.so.1) for tests without a GPU:
// the driver's calls over fake_gpu.h. A "module" is any bytes and has every function except
// "missing"; the first function is named by the module's kernels (cuModuleGetFunction's name). A
// test scripts it through FakeCudaFail (the named call returns the given result, `after` successes
// later) and FakeCudaTrap (a launch that loses its device), and counts calls by name. Build flags
// leave things out: FAKE_CUDA_OLD reports CUDA 11.4, FAKE_CUDA_PARTIAL lacks cuLaunchKernel.
#include <cuda.h>
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/fake_gpu.h"

namespace {

using attnd::LaunchParams;
using attnd::fake::Device;
using attnd::fake::EngineKind;
using attnd::fake::Event;
using attnd::fake::Function;
using attnd::fake::Module;
using attnd::fake::Operation;
using attnd::fake::Pool;
using attnd::fake::Stream;
using attnd::fake::world;

// Copies take 10 GB/s and 2 us each; kernels 3 us a launch and 0.1 us a tile.
constexpr double kBytesPerSecond = 10e9;
constexpr double kCopySeconds = 2e-6;
constexpr double kLaunchSeconds = 3e-6;
constexpr double kTileSeconds = 1e-7;

thread_local Device* current = nullptr;

using Lock = std::lock_guard<std::mutex>;

// With the lock held. The scripted result, or the loss of the current device, or success.
CUresult Next(const char* call) {
  ++world().calls[call];
  auto found = world().failures.find(call);
  if (found != world().failures.end() && found->second.first-- <= 0) {
    found->second.first = 0;
    return found->second.second;
  }
  return current == nullptr ? CUDA_SUCCESS : current->lost;
}
CUresult Enter(const char* call) {
  Lock lock(world().mutex);
  return Next(call);
}

template <class Made, class Raw>
CUresult Create(const char* call, Raw* out, Made** made = nullptr) {
  Lock lock(world().mutex);
  CUresult result = Next(call);
  if (result != CUDA_SUCCESS) return result;
  auto* object = new Made();
  if (made != nullptr) *made = object;
  *out = reinterpret_cast<Raw>(object);
  ++world().live;
  return CUDA_SUCCESS;
}
template <class Made, class Raw>
CUresult Destroy(const char* call, Raw raw) {
  Lock lock(world().mutex);
  delete reinterpret_cast<Made*>(raw);
  --world().live;
  return Next(call);
}

CUresult Push(const char* call, CUstream stream, Operation operation) {
  Lock lock(world().mutex);
  CUresult result = Next(call);
  if (result != CUDA_SUCCESS) return result;
  if (operation.record != nullptr) ++operation.record->recorded;
  if (operation.wait != nullptr) operation.wait_for = operation.wait->recorded;
  world().Push(*reinterpret_cast<Stream*>(stream), std::move(operation));
  return CUDA_SUCCESS;
}
// As the driver wants the device's side of one command.
bool InOneAllocation(CUstream stream, CUdeviceptr begin, size_t bytes) {
  Lock lock(world().mutex);
  const auto& blocks = reinterpret_cast<Stream*>(stream)->device->blocks;
  const auto next = blocks.upper_bound(begin);
  if (next == blocks.begin()) return false;
  const auto& [address, block] = *std::prev(next);
  return begin + bytes <= address + static_cast<size_t>(block.second);
}
CUresult PushCopy(const char* call, EngineKind engine, CUstream stream, void* to, const void* from,
                  size_t bytes) {
  return Push(call, stream,
              {.engine = engine,
               .seconds = kCopySeconds + static_cast<double>(bytes) / kBytesPerSecond,
               .effect = [=] { std::memcpy(to, from, bytes); }});
}

// XIDs that no call has waited for yet. Not under the world's mutex: a wait takes time.
struct Xids {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<Device*, unsigned long long>> events;
};
Xids& xids() {
  static Xids& instance = *new Xids();
  return instance;
}
// nvmlEventData_t.
struct EventData {
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};

// nvmlUtilization_t, nvmlProcessInfo_v2_t.
struct Utilisation {
  unsigned gpu, memory;
};
struct ProcessInfo {
  unsigned process_id;
  unsigned long long used_bytes;
  unsigned gpu_instance, compute_instance;
};

// Utilisation and processes of the device.
std::vector<unsigned> UseOf(void* device) {
  const char* path = std::getenv("FAKE_NVML_USE");
  std::vector<unsigned> numbers;
  if (path == nullptr || device != &world().devices[0]) return numbers;
  std::ifstream file(path);
  for (unsigned number = 0; file >> number;) numbers.push_back(number);
  return numbers;
}

// Memory larger than anything a test touches is only an address.
constexpr int64_t kTouchedBytes = int64_t{256} << 20;

}  // namespace

extern "C" {

// The test's side.
void FakeCudaFail(const char* call, int after, int result) {
  Lock lock(world().mutex);
  world().failures[call] = {after, static_cast<CUresult>(result)};
}
// The launch after `launches` more ones on the device loses it (illegal address).
void FakeCudaTrap(int device, int launches) {
  Lock lock(world().mutex);
  world().devices[device].trap_in = launches;
}
void FakeCudaReset() {
  Lock lock(world().mutex);
  world().failures.clear();
  world().calls.clear();
  world().launches = 0;
  world().device_count = 1;
  world().jitter = 0;
  for (Device& device : world().devices) {
    device.lost = CUDA_SUCCESS;
    device.trap_in = -1;
    for (bool& busy : device.busy) busy = false;
  }
}
void FakeCudaDevices(int count) {
  Lock lock(world().mutex);
  world().device_count = count;
}
// Operations take a random time from now on.
void FakeCudaSeed(uint64_t seed) {
  Lock lock(world().mutex);
  world().random.seed(seed);
  world().jitter = 10;
}
int FakeCudaLive() { return world().live; }
int FakeCudaLaunches() { return world().launches; }
int64_t FakeCudaCalls(const char* call) {
  Lock lock(world().mutex);
  auto found = world().calls.find(call);
  return found == world().calls.end() ? 0 : found->second;
}
// Names and counts of all calls since the last reset, "cuInit 1\n...".
const char* FakeCudaAllCalls() {
  Lock lock(world().mutex);
  static std::string& text = *new std::string();
  text.clear();
  for (const auto& [name, count] : world().calls) text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}

CUresult cuInit(unsigned) { return Enter("cuInit"); }
CUresult cuDriverGetVersion(int* version) {
#ifdef FAKE_CUDA_OLD
  *version = 11040;
#else
  *version = 12090;
#endif
  return Enter("cuDriverGetVersion");
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  if (error == CUDA_ERROR_OUT_OF_MEMORY) *text = "CUDA_ERROR_OUT_OF_MEMORY";
  if (error == CUDA_ERROR_ILLEGAL_ADDRESS) *text = "CUDA_ERROR_ILLEGAL_ADDRESS";
  bool known = error == CUDA_ERROR_OUT_OF_MEMORY || error == CUDA_ERROR_ILLEGAL_ADDRESS;
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  if (error != CUDA_ERROR_OUT_OF_MEMORY) return CUDA_ERROR_INVALID_VALUE;
  *text = "out of memory";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = world().device_count;
  return Enter("cuDeviceGetCount");
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= world().device_count) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return Enter("cuDeviceGet");
}
CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
  std::strncpy(name, "Fake V100", bytes);
  return Enter("cuDeviceGetName");
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(0xa0 + i + device);
  return Enter("cuDeviceGetUuid");
}
CUresult cuDeviceGetPCIBusId(char* id, int bytes, CUdevice device) {
  std::strncpy(id, device == 0 ? "0000:3b:00.0" : "0000:3c:00.0", bytes);
  return Enter("cuDeviceGetPCIBusId");
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = attnd::fake::kTotalBytes;
  return Enter("cuDeviceTotalMem");
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 7;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 80;
      break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      *value = 1530000;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = 96 << 10;
      break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      *value = 1;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return Enter("cuDeviceGetAttribute");
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  Lock lock(world().mutex);
  CUresult result = Next("cuDevicePrimaryCtxRetain");
  if (result != CUDA_SUCCESS) return result;
  *context = reinterpret_cast<CUcontext>(&world().devices[device]);
  ++world().live;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  Lock lock(world().mutex);
  --world().live;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  current = reinterpret_cast<Device*>(context);
  return Enter("cuCtxSetCurrent");
}
CUresult cuCtxSynchronize() { return Enter("cuCtxSynchronize"); }
CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  *total = attnd::fake::kTotalBytes;
  *free_bytes = attnd::fake::kFreeBytes;
  return Enter("cuMemGetInfo");
}
CUresult cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* properties) {
  Pool* pool = nullptr;
  CUresult result = Create<Pool>("cuMemPoolCreate", out, &pool);
  if (result != CUDA_SUCCESS) return result;
  pool->device = &world().devices[properties->location.id];
  pool->limit = properties->maxSize == 0 ? attnd::fake::kFreeBytes : properties->maxSize;
  return result;
}
CUresult cuMemPoolDestroy(CUmemoryPool pool) { return Destroy<Pool>("cuMemPoolDestroy", pool); }
CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, void*) {
  return Enter("cuMemPoolSetAttribute");
}
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute, void* value) {
  *static_cast<cuuint64_t*>(value) = reinterpret_cast<Pool*>(pool)->reserved;
  return Enter("cuMemPoolGetAttribute");
}
CUresult cuMemAllocFromPoolAsync(CUdeviceptr* out, size_t bytes, CUmemoryPool raw, CUstream) {
  Lock lock(world().mutex);
  CUresult result = Next("cuMemAllocFromPoolAsync");
  if (result != CUDA_SUCCESS) return result;
  Pool& pool = *reinterpret_cast<Pool*>(raw);
  int64_t size = static_cast<int64_t>(bytes);
  if (pool.used + size > pool.limit) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = size > kTouchedBytes ? mmap(nullptr, bytes, PROT_NONE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                                      : std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  if (memory == MAP_FAILED || memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  if (size <= kTouchedBytes) std::memset(memory, 0xff, bytes);  // NaN, so that gaps show
  *out = reinterpret_cast<CUdeviceptr>(memory);
  pool.device->blocks[*out] = {&pool, size};
  pool.used += size;
  pool.reserved = std::max(pool.reserved, pool.used);
  ++world().live;
  return CUDA_SUCCESS;
}
CUresult cuMemFreeAsync(CUdeviceptr memory, CUstream raw) {
  Lock lock(world().mutex);
  auto& stream = *reinterpret_cast<Stream*>(raw);
  auto found = stream.device->blocks.find(memory);
  if (found == stream.device->blocks.end()) return CUDA_ERROR_INVALID_VALUE;
  auto [pool, size] = found->second;
  stream.device->blocks.erase(found);
  pool->used -= size;
  --world().live;
  if (size > kTouchedBytes) {
    munmap(reinterpret_cast<void*>(memory), size);
  } else {
    world().Push(stream, {.effect = [memory] { std::free(reinterpret_cast<void*>(memory)); }});
  }
  return Next("cuMemFreeAsync");
}
CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  Lock lock(world().mutex);
  CUresult result = Next("cuMemHostAlloc");
  if (result != CUDA_SUCCESS) return result;
  *out = std::malloc(bytes);
  ++world().live;
  return CUDA_SUCCESS;
}
// Waits for the work of every device first, as the driver does.
CUresult cuMemFreeHost(void* memory) {
  Lock lock(world().mutex);
  for (attnd::fake::Device& device : world().devices) {
    for (Stream* stream : device.streams) world().Drain(*stream);
  }
  std::free(memory);
  --world().live;
  return Next("cuMemFreeHost");
}
CUresult cuMemHostRegister_v2(void*, size_t, unsigned) {
  Lock lock(world().mutex);
  CUresult result = Next("cuMemHostRegister");
  if (result == CUDA_SUCCESS) ++world().live;
  return result;
}
CUresult cuMemHostUnregister(void*) {
  Lock lock(world().mutex);
  --world().live;
  return Next("cuMemHostUnregister");
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (!InOneAllocation(stream, to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return PushCopy("cuMemcpyHtoDAsync", EngineKind::kUpload, stream, reinterpret_cast<void*>(to),
                  from, bytes);
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (!InOneAllocation(stream, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return PushCopy("cuMemcpyDtoHAsync", EngineKind::kDownload, stream, to,
                  reinterpret_cast<void*>(from), bytes);
}
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* rows, CUstream stream) {
  const CUDA_MEMCPY2D copy = *rows;
  const bool up = copy.srcMemoryType == CU_MEMORYTYPE_HOST;
  const size_t longest = size_t{1} << 31;
  if (copy.WidthInBytes > copy.srcPitch || copy.WidthInBytes > copy.dstPitch ||
      copy.srcPitch >= longest || copy.dstPitch >= longest) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const size_t spanned =
      (copy.Height - 1) * (up ? copy.dstPitch : copy.srcPitch) + copy.WidthInBytes;
  if (!InOneAllocation(stream, up ? copy.dstDevice : copy.srcDevice, spanned)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const double bytes = static_cast<double>(copy.WidthInBytes * copy.Height);
  return Push(
      "cuMemcpy2DAsync", stream,
      {.engine = up ? EngineKind::kUpload : EngineKind::kDownload,
       .seconds = kCopySeconds + bytes / kBytesPerSecond,
       .effect = [copy, up] {
         const auto* from = static_cast<const char*>(
             up ? copy.srcHost : reinterpret_cast<const void*>(copy.srcDevice));
         auto* to = static_cast<char*>(up ? reinterpret_cast<void*>(copy.dstDevice) : copy.dstHost);
         for (size_t n = 0; n < copy.Height; ++n) {
           std::memcpy(to + n * copy.dstPitch, from + n * copy.srcPitch, copy.WidthInBytes);
         }
       }});
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  if (!InOneAllocation(stream, to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return Push("cuMemsetD8Async", stream,
              {.engine = EngineKind::kCompute, .seconds = kCopySeconds, .effect = [=] {
                 std::memset(reinterpret_cast<void*>(to), value, bytes);
               }});
}
CUresult cuStreamCreate(CUstream* out, unsigned) {
  Stream* stream = nullptr;
  CUresult result = Create<Stream>("cuStreamCreate", out, &stream);
  if (result != CUDA_SUCCESS) return result;
  Lock lock(world().mutex);
  stream->device = current;
  current->streams.push_back(stream);
  return result;
}
CUresult cuStreamDestroy_v2(CUstream raw) {
  {
    Lock lock(world().mutex);
    auto* stream = reinterpret_cast<Stream*>(raw);
    world().Drain(*stream);
    for (Operation& left : stream->operations) {  // of a lost device: its memory at least
      if (left.engine == EngineKind::kNone && left.effect) left.effect();
    }
    std::erase(stream->device->streams, stream);
  }
  return Destroy<Stream>("cuStreamDestroy", raw);
}
CUresult cuStreamSynchronize(CUstream stream) {
  Lock lock(world().mutex);
  world().Drain(*reinterpret_cast<Stream*>(stream));
  return Next("cuStreamSynchronize");
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent raw, unsigned) {
  return Push("cuStreamWaitEvent", stream, {.wait = reinterpret_cast<Event*>(raw)->state});
}
CUresult cuEventCreate(CUevent* out, unsigned) { return Create<Event>("cuEventCreate", out); }
CUresult cuEventDestroy_v2(CUevent event) { return Destroy<Event>("cuEventDestroy", event); }
CUresult cuEventRecord(CUevent raw, CUstream stream) {
  return Push("cuEventRecord", stream, {.record = reinterpret_cast<Event*>(raw)->state});
}
CUresult cuEventQuery(CUevent raw) {
  Lock lock(world().mutex);
  CUresult result = Next("cuEventQuery");
  if (result != CUDA_SUCCESS) return result;
  const auto& event = reinterpret_cast<Event*>(raw)->state;
  if (event->passed < event->recorded && current != nullptr) world().Step(*current);
  if (current != nullptr && current->lost != CUDA_SUCCESS) return current->lost;
  return event->passed >= event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent stop) {
  Lock lock(world().mutex);
  *milliseconds = static_cast<float>(1e3 * (reinterpret_cast<Event*>(stop)->state->time -
                                            reinterpret_cast<Event*>(start)->state->time));
  return Next("cuEventElapsedTime");
}
CUresult cuModuleLoadData(CUmodule* out, const void*) {
  return Create<Module>("cuModuleLoadData", out);
}
CUresult cuModuleUnload(CUmodule module) { return Destroy<Module>("cuModuleUnload", module); }
CUresult cuModuleGetFunction(CUfunction* out, CUmodule raw, const char* name) {
  if (std::strcmp(name, "missing") == 0) return CUDA_ERROR_NOT_FOUND;
  Lock lock(world().mutex);
  auto& function = reinterpret_cast<Module*>(raw)->functions[name];
  if (function == nullptr) function = std::make_unique<Function>(Function{name});
  *out = reinterpret_cast<CUfunction>(function.get());
  return Next("cuModuleGetFunction");
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return Enter("cuFuncSetAttribute");
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*,
                                const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {};
  return Enter("cuTensorMapEncodeTiled");
}
#ifndef FAKE_CUDA_PARTIAL
CUresult cuLaunchKernel(CUfunction raw, unsigned blocks, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream stream, void** arguments, void**) {
  Lock lock(world().mutex);
  CUresult result = Next("cuLaunchKernel");
  if (result != CUDA_SUCCESS) return result;
  ++world().launches;
  LaunchParams params = *static_cast<const LaunchParams*>(arguments[0]);
  const std::string& name = reinterpret_cast<Function*>(raw)->name;
  Device& device = *reinterpret_cast<Stream*>(stream)->device;
  Operation operation = {.engine = EngineKind::kCompute,
                         .seconds = kLaunchSeconds + blocks * kTileSeconds,
                         .effect = [name, params] { attnd::fake::RunKernel(name, params); }};
  operation.traps = device.trap_in >= 0 && device.trap_in-- == 0;
  world().Push(*reinterpret_cast<Stream*>(stream), std::move(operation));
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                          void** extra) {
  return cuLaunchKernel(function, config->gridDimX, 1, 1, config->blockDimX, 1, 1,
                        config->sharedMemBytes, config->hStream, arguments, extra);
}
#endif

void FakeNvmlXid(int device, unsigned long long xid) {
  {
    std::lock_guard<std::mutex> lock(xids().mutex);
    xids().events.push_back({&world().devices[device], xid});
  }
  xids().changed.notify_all();
}
int nvmlEventSetCreate(void** set) {
  *set = &xids();
  return 0;
}
int nvmlEventSetFree(void*) { return 0; }
int nvmlDeviceRegisterEvents(void*, unsigned long long types, void*) { return types == 8 ? 0 : 2; }
int nvmlEventSetWait_v2(void*, EventData* data, unsigned milliseconds) {
  std::unique_lock<std::mutex> lock(xids().mutex);
  const bool came = xids().changed.wait_for(lock, std::chrono::milliseconds(milliseconds),
                                            [] { return !xids().events.empty(); });
  if (!came) return 10;
  *data = {xids().events.front().first, 8, xids().events.front().second, 0, 0};
  xids().events.pop_front();
  return 0;
}

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "Not Found"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  if (std::strncmp(id, "0000:3", 6) != 0) return 6;
  *device = &world().devices[std::strncmp(id, "0000:3b", 7) == 0 ? 0 : 1];
  return 0;
}
// FAKE_NVML_USE names a file "UTILISATION [PROCESS ...]", that of the first device; others are
// idle.
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = &world().devices[index];
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  const bool second = std::strcmp(uuid, "GPU-fake-1") == 0;
  if (!second && std::strcmp(uuid, "GPU-fake-0") != 0) return 6;
  *device = &world().devices[second ? 1 : 0];
  return 0;
}
int nvmlDeviceGetUtilizationRates(void* device, Utilisation* utilisation) {
  const std::vector<unsigned> use = UseOf(device);
  *utilisation = {use.empty() ? 0 : use[0], 0};
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, ProcessInfo* processes) {
  const std::vector<unsigned> use = UseOf(device);
  const unsigned found = use.empty() ? 0 : static_cast<unsigned>(use.size() - 1), room = *count;
  *count = found;
  if (room < found) return 7;
  for (unsigned n = 0; n < found; ++n) processes[n] = {use[n + 1], 1 << 20, ~0u, ~0u};
  return 0;
}
int nvmlDeviceGetUUID(void* device, char* text, unsigned bytes) {
  std::strncpy(text, device == &world().devices[0] ? "GPU-fake-0" : "GPU-fake-1", bytes);
  return 0;
}

}  // extern "C"
