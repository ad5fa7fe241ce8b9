// KernelLibrary: the kernels of one GPU: from a row of the kernel table to a loaded function.
//
//   shipped for this GPU's architecture    from the archive inside the program
//   anything else in the table             compiled at run time where libnvrtc is present (about a
//                                          second), and kept in the disk cache (kernel_cache.h)
//
// An architecture may run the code of an earlier one of its generation (sm_86 runs sm_80's).
// Errors: UNIMPLEMENTED from Check, saying what is missing; INTERNAL from Get with the driver's or
// compiler's words. Threads: one at a time, with the device's context current. Functions live as
// long as the library.
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/driver/handles.h"
#include "kernels/cuda/library/kernel_archive.h"
#include "kernels/cuda/library/kernel_cache.h"
#include "kernels/cuda/library/nvrtc.h"
#include "kernels/tiles.h"

namespace attnd {

struct LoadedKernel {
  CUfunction function = nullptr;
  int threads = 0;
  int64_t shared_bytes = 0;
};

class KernelLibrary {
 public:
  struct Options {
    std::string cache_directory = "";  // see KernelCache
    std::string compiler = "";         // libnvrtc; empty: by its usual names
    int64_t shared_bytes_per_block = std::numeric_limits<int64_t>::max();  // what the GPU allows
  };
  // `archives` outlive the library; each is one target's. `major`.`minor`: compute capability.
  static absl::StatusOr<std::unique_ptr<KernelLibrary>> Create(
      const Driver& driver, int major, int minor, const std::vector<absl::string_view>& archives,
      const Options& options);

  // OK where Get can work, but that a kernel compiled here may want more shared memory than the GPU
  // has; compiles and loads nothing.
  absl::Status Check(const KernelRow& row) const;
  absl::StatusOr<LoadedKernel> Get(const KernelRow& row);

  // Covers all kernels that are shipped for this GPU.
  std::string Checksum() const;

  // "sm_70", and how many kernels were compiled since the start (not found in the cache).
  const std::string& target() const { return target_; }
  int compiled() const { return compiled_; }

 private:
  KernelLibrary(const Driver& driver, std::string target, const Options& options)
      : driver_(driver),
        target_(std::move(target)),
        shared_bytes_per_block_(options.shared_bytes_per_block),
        cache_(options.cache_directory) {}
  absl::Status CheckSharedMemory(const ArchivedKernel& kernel) const;
  absl::StatusOr<LoadedKernel> Load(const ArchivedKernel& kernel);
  absl::StatusOr<LoadedKernel> LoadCompiled(const KernelRow& row);
  std::string CacheKey(const KernelRow& row) const;

  const Driver& driver_;
  const std::string target_;
  const int64_t shared_bytes_per_block_;
  KernelArchive shipped_;            // for the target, or an earlier one of its generation
  std::unique_ptr<Nvrtc> compiler_;  // null: none
  std::string why_no_compiler_;
  KernelCache cache_;
  int compiled_ = 0;
  std::vector<Module> modules_;
  std::map<std::string, LoadedKernel> loaded_;  // by NameOf
};

}  // namespace attnd
