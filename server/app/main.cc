// attnd: the daemon, with the engines of kernels/registry/registry.h.
#include "kernels/registry/registry.h"
#include "server/app/daemon_main.h"

int main(int argc, char** argv) {
  return attnd::DaemonMain(argc, argv, [](const attnd::ServerOptions& options, std::string* note) {
    return attnd::MakeDevices(options.backend,
                              {.cpu_threads = options.cpu_threads,
                               .devices = options.devices,
                               .memory_fraction = options.hbm_fraction,
                               .max_slice_seconds = options.max_launch_ms * 1e-3,
                               .kernel_cache = options.kernel_cache,
                               .fusion = options.fusion,
                               .nccl_library = options.nccl_library,
                               .mask_plans = options.mask_plans},
                              note);
  });
}
