// Any bytes → a layout, rows and steps of a module that are refused by name, or run. Bytes choose a
// random layout, then change what its message says. One thread.
//
//   ATTND_TEST_LAYOUTS=1000000 bazel-bin/tests/fuzz/module_fuzzer_test
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnd {

struct FuzzedModule {
  bool was_run = false;
  double check_seconds = 0;  // of the processor, until it was refused or planned
  int64_t check_bytes = 0;   // of the heap that its result holds
};

FuzzedModule FuzzModule(const uint8_t* data, size_t size);

}  // namespace attnd
