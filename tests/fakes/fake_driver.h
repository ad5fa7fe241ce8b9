// FakeDriver: a test's side of the stand-in for libcuda.so.1 (fake_cuda.cc): what it scripts and
// what it counts. Reset at both ends of a test.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <string>

#include "gtest/gtest.h"

namespace attnd {

class FakeDriver {
 public:
  static constexpr char kLibrary[] = "tests/fakes/libfake_cuda.so";

  FakeDriver() : library_(dlopen(kLibrary, RTLD_NOW)) {
    EXPECT_NE(library_, nullptr) << dlerror();
    Find(fail, "FakeCudaFail");
    Find(trap, "FakeCudaTrap");
    Find(reset, "FakeCudaReset");
    Find(set_devices, "FakeCudaDevices");
    Find(seed, "FakeCudaSeed");
    Find(xid, "FakeNvmlXid");
    Find(live, "FakeCudaLive");
    Find(launches, "FakeCudaLaunches");
    Find(calls, "FakeCudaCalls");
    Find(all_calls, "FakeCudaAllCalls");
    reset();
  }
  // All that the test made is gone by now.
  ~FakeDriver() {
    reset();
    EXPECT_EQ(live(), 0) << "driver objects leaked";
  }

  // The named call returns `result` once, after `after` successes.
  void (*fail)(const char* call, int after, int result);
  // The launch after `launches` more on the device loses it.
  void (*trap)(int device, int launches);
  void (*reset)();
  void (*set_devices)(int count);
  void (*seed)(uint64_t seed);                      // operations take random times
  void (*xid)(int device, unsigned long long xid);  // to NVML's listeners
  int (*live)();                                    // objects and blocks not given back
  int (*launches)();
  int64_t (*calls)(const char* call);
  const char* (*all_calls)();  // "cuInit 1\n...", since the last reset

 private:
  template <class Function>
  void Find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
  }
  void* const library_;
};

}  // namespace attnd
