#include "server/engine.h"

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"

namespace attnd {

absl::StatusOr<std::unique_ptr<Backend>> MakeEngine(const std::string& name, int cpu_threads,
                                                    int64_t memory_bytes) {
  if (name == "auto" || name == "cpu") {
    return MakeCpuBackend({.threads = cpu_threads, .memory_bytes = memory_bytes});
  }
  if (name == "reference") return std::make_unique<ReferenceBackend>();
  return absl::UnavailableError(absl::StrCat("--backend: this build has no engine ", name));
}

}  // namespace attnd
