#include "kernels/cuda/library/embedded_kernels.h"

extern "C" {
extern const char attnd_kernels_70[], attnd_kernels_70_end[];
extern const char attnd_kernels_80[], attnd_kernels_80_end[];
extern const char attnd_kernels_90[], attnd_kernels_90_end[];
}

namespace attnd {
namespace {

absl::string_view Between(const char* begin, const char* end) {
  return {begin, static_cast<size_t>(end - begin)};
}

}  // namespace

std::vector<absl::string_view> EmbeddedKernelArchives() {
  return {Between(attnd_kernels_70, attnd_kernels_70_end),
          Between(attnd_kernels_80, attnd_kernels_80_end),
          Between(attnd_kernels_90, attnd_kernels_90_end)};
}

}  // namespace attnd
