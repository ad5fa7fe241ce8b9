// Nvrtc: NVIDIA's run-time compiler (libnvrtc), found at run time. The build uses it too, from the
// folder of the compiler package.
// Errors: FAILED_PRECONDITION without the library; INTERNAL with the compiler's log when it refuses
// a source. Threads: one at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/library/kernel_source.h"

namespace attnd {

struct CompiledKernel {
  std::string cubin;
  std::string entry;  // lowered name
  std::string log;
  int threads = 0;
  int64_t shared_bytes = 0;
  int registers = 0;
  int spill_bytes = 0;  // stored
};

class Nvrtc {
 public:
  // Empty: the versions that this source compiles with, by their usual names.
  static absl::StatusOr<std::unique_ptr<Nvrtc>> Load(const std::string& library);
  Nvrtc(const Nvrtc&) = delete;
  Nvrtc& operator=(const Nvrtc&) = delete;

  std::string version() const { return version_; }  // "12.9"
  // Whether it still makes code for "sm_70".
  bool Targets(const std::string& target) const;
  absl::StatusOr<CompiledKernel> Compile(const KernelRow& row, const std::string& target) const;

 private:
  using Program = struct NvrtcProgram*;
  using Result = int;  // nvrtcResult; 0 is success
  struct Functions {
    Result (*version)(int*, int*);
    Result (*architecture_count)(int*);
    Result (*architectures)(int*);
    const char* (*error_string)(Result);
    Result (*create)(Program*, const char*, const char*, int, const char* const*,
                     const char* const*);
    Result (*destroy)(Program*);
    Result (*compile)(Program, int, const char* const*);
    Result (*add_name)(Program, const char*);
    Result (*lowered_name)(Program, const char*, const char**);
    Result (*log_size)(Program, size_t*);
    Result (*log)(Program, char*);
    Result (*cubin_size)(Program, size_t*);
    Result (*cubin)(Program, char*);
    Result (*ptx_size)(Program, size_t*);
    Result (*ptx)(Program, char*);
  };
  Nvrtc() = default;
  absl::Status Check(Result result, const char* call) const;
  absl::StatusOr<CompiledKernel> CompileProgram(Program program, const KernelSource& source,
                                                const std::string& target) const;

  Functions functions_ = {};
  std::string version_;
  std::vector<int> architectures_;
};

}  // namespace attnd
