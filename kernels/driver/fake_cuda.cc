// A stand-in for libcuda.so.1 (and, in the same file, libnvidia-ml.so.1) for tests without a GPU:
// device memory is host memory, streams run at once, a "module" is any bytes and has every
// function except "missing". A test scripts it through FakeCudaFail: the named call then returns
// the given result, `after` successes later. Build flags leave things out: FAKE_CUDA_OLD reports
// CUDA 11.4, FAKE_CUDA_PARTIAL lacks cuLaunchKernel.
#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

struct Script {
  std::mutex mutex;
  std::map<std::string, std::pair<int, CUresult>> failures;
  int live = 0;  // allocations, streams, events, modules, contexts
  int launches = 0;
};
Script& script() {
  static Script& instance = *new Script();
  return instance;
}

CUresult Next(const char* call) {
  std::lock_guard<std::mutex> lock(script().mutex);
  auto found = script().failures.find(call);
  if (found == script().failures.end() || found->second.first-- > 0) return CUDA_SUCCESS;
  found->second.first = 0;
  return found->second.second;
}

void Count(int change) {
  std::lock_guard<std::mutex> lock(script().mutex);
  script().live += change;
}

template <class T>
CUresult Create(const char* call, T* out, size_t bytes = 1) {
  CUresult result = Next(call);
  if (result != CUDA_SUCCESS) return result;
  *out = reinterpret_cast<T>(std::malloc(bytes));
  Count(1);
  return CUDA_SUCCESS;
}
template <class T>
CUresult Destroy(const char* call, T what) {
  std::free(reinterpret_cast<void*>(what));
  Count(-1);
  return Next(call);
}

}  // namespace

extern "C" {

// The test's side.
void FakeCudaFail(const char* call, int after, int result) {
  std::lock_guard<std::mutex> lock(script().mutex);
  script().failures[call] = {after, static_cast<CUresult>(result)};
}
void FakeCudaReset() {
  std::lock_guard<std::mutex> lock(script().mutex);
  script().failures.clear();
  script().launches = 0;
}
int FakeCudaLive() { return script().live; }
int FakeCudaLaunches() { return script().launches; }

CUresult cuInit(unsigned) { return Next("cuInit"); }
CUresult cuDriverGetVersion(int* version) {
#ifdef FAKE_CUDA_OLD
  *version = 11040;
#else
  *version = 12090;
#endif
  return Next("cuDriverGetVersion");
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
  *count = 1;
  return Next("cuDeviceGetCount");
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
  *device = 0;
  return Next("cuDeviceGet");
}
CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
  std::strncpy(name, "Fake V100", bytes);
  return Next("cuDeviceGetName");
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(0xa0 + i);
  return Next("cuDeviceGetUuid");
}
CUresult cuDeviceGetPCIBusId(char* id, int bytes, CUdevice) {
  std::strncpy(id, "0000:3b:00.0", bytes);
  return Next("cuDeviceGetPCIBusId");
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = size_t{16} << 30;
  return Next("cuDeviceTotalMem");
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
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return Next("cuDeviceGetAttribute");
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  CUresult result = Next("cuDevicePrimaryCtxRetain");
  if (result != CUDA_SUCCESS) return result;
  *context = reinterpret_cast<CUcontext>(&script());
  Count(1);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  Count(-1);
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return Next("cuCtxSetCurrent"); }
CUresult cuCtxSynchronize() { return Next("cuCtxSynchronize"); }
CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  *total = size_t{16} << 30;
  *free_bytes = *total - (size_t{1} << 30);
  return Next("cuMemGetInfo");
}
CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
  CUresult result = Next("cuMemAlloc");
  if (result != CUDA_SUCCESS) return result;
  *out = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  Count(1);
  return CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr memory) { return Destroy("cuMemFree", memory); }
CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  return Create("cuMemHostAlloc", out, bytes);
}
CUresult cuMemFreeHost(void* memory) { return Destroy("cuMemFreeHost", memory); }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return Next("cuMemcpyHtoDAsync");
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return Next("cuMemcpyDtoHAsync");
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return Next("cuMemcpyDtoDAsync");
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream) {
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return Next("cuMemsetD8Async");
}
CUresult cuStreamCreate(CUstream* out, unsigned) { return Create("cuStreamCreate", out); }
CUresult cuStreamDestroy_v2(CUstream stream) { return Destroy("cuStreamDestroy", stream); }
CUresult cuStreamSynchronize(CUstream) { return Next("cuStreamSynchronize"); }
CUresult cuStreamQuery(CUstream) { return Next("cuStreamQuery"); }
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return Next("cuStreamWaitEvent"); }
CUresult cuEventCreate(CUevent* out, unsigned) { return Create("cuEventCreate", out); }
CUresult cuEventDestroy_v2(CUevent event) { return Destroy("cuEventDestroy", event); }
CUresult cuEventRecord(CUevent, CUstream) { return Next("cuEventRecord"); }
CUresult cuEventQuery(CUevent) { return Next("cuEventQuery"); }
CUresult cuEventSynchronize(CUevent) { return Next("cuEventSynchronize"); }
CUresult cuEventElapsedTime(float* milliseconds, CUevent, CUevent) {
  *milliseconds = 2;
  return Next("cuEventElapsedTime");
}
CUresult cuModuleLoadData(CUmodule* out, const void*) { return Create("cuModuleLoadData", out); }
CUresult cuModuleUnload(CUmodule module) { return Destroy("cuModuleUnload", module); }
CUresult cuModuleGetFunction(CUfunction* out, CUmodule, const char* name) {
  if (std::strcmp(name, "missing") == 0) return CUDA_ERROR_NOT_FOUND;
  *out = reinterpret_cast<CUfunction>(&script());
  return Next("cuModuleGetFunction");
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 255 : 0;
  return Next("cuFuncGetAttribute");
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return Next("cuFuncSetAttribute");
}
#ifndef FAKE_CUDA_PARTIAL
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void**, void**) {
  ++script().launches;
  return Next("cuLaunchKernel");
}
#endif

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "Not Found"; }
int nvmlSystemGetDriverVersion(char* text, unsigned bytes) {
  std::strncpy(text, "535.183.01", bytes);
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  *device = &script();
  return std::strcmp(id, "0000:3b:00.0") == 0 ? 0 : 6;
}
int nvmlDeviceGetName(void*, char* text, unsigned bytes) {
  std::strncpy(text, "Fake V100", bytes);
  return 0;
}
int nvmlDeviceGetUUID(void*, char* text, unsigned bytes) {
  std::strncpy(text, "GPU-fake", bytes);
  return 0;
}
int nvmlDeviceGetTemperature(void*, int, unsigned* value) {
  *value = 41;
  return 0;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* value) {
  *value = 250500;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(void*, int, int, unsigned long long*) { return 3; }  // unsupported

}  // extern "C"
