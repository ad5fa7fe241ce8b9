// faulty_attnd: attnd on GPUs that can be broken from outside, to see what the daemon makes of it.
//
//     ATTND_TRAP=/tmp/trap faulty_attnd --devices all ...      as attnd
//     touch /tmp/trap1                                         the next kernel of GPU 1
//
// traps: an illegal instruction, after which the process' context on that GPU is lost. Each file
// breaks one kernel and is taken away by it, so that a restarted daemon is whole.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/driver_device.h"
#include "kernels/layers/cuda/cuda_module_engine.h"
#include "server/app/daemon_main.h"

namespace attnd {
namespace {

constexpr char kTrapPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry trap_kernel() {
  trap;
})";

// The trap of one GPU.
class Trap {
 public:
  explicit Trap(int ordinal) {
    const char* prefix = std::getenv("ATTND_TRAP");
    if (prefix != nullptr) file_ = absl::StrCat(prefix, ordinal);
  }

  absl::StatusOr<bool> Instead(const Driver& driver, StreamRef stream) {
    if (file_.empty() || std::remove(file_.c_str()) != 0) return false;
    // Not given back: the context that it belongs to is lost.
    auto* module = new Module();
    ASSIGN_OR_RETURN(*module, Module::Load(driver, kTrapPtx));
    ASSIGN_OR_RETURN(CUfunction function, module->Function("trap_kernel"));
    RETURN_IF_ERROR(stream.Launch(function, {.blocks = 1, .threads = 32}, {}));
    return true;
  }

 private:
  std::string file_;
};

absl::StatusOr<std::vector<Device>> MakeDevices(const ServerOptions& options, std::string*) {
  std::vector<int> ordinals = options.devices;
  if (ordinals.empty()) {
    ASSIGN_OR_RETURN(const int count, cuda::CountDevices());
    for (int n = 0; n < count; ++n) ordinals.push_back(n);
  }
  std::vector<Device> devices;
  for (int ordinal : ordinals) {
    // The hook lives as long as the device.
    auto trap = std::make_shared<Trap>(ordinal);
    ASSIGN_OR_RETURN(
        auto device,
        cuda::MakeDriverDevice(
            {.ordinal = ordinal,
             .memory_fraction = options.hbm_fraction,
             .max_slice_seconds = options.max_launch_ms * 1e-3,
             .stand_in = [trap](const Driver& driver, StreamRef stream, const cuda::KernelStep&) {
               return trap->Instead(driver, stream);
             }}));
    devices.push_back(GpuDeviceOf(std::make_unique<cuda::CudaBackend>(std::move(device))));
  }
  return devices;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::DaemonMain(argc, argv, attnd::MakeDevices); }
