#include "server/app/gpu_watch.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr absl::Duration kPeriod = absl::Milliseconds(100);  // how soon it stops

}  // namespace

absl::StatusOr<std::unique_ptr<GpuWatch>> GpuWatch::Start(
    const std::string& nvml_library, const std::vector<std::string>& pci_bus_ids,
    OnFatal on_fatal) {
  std::vector<std::string> gpus;
  for (const std::string& id : pci_bus_ids) {
    if (!id.empty()) gpus.push_back(id);
  }
  if (gpus.empty()) return absl::FailedPreconditionError("no GPU to watch");
  auto watch = std::unique_ptr<GpuWatch>(new GpuWatch());
  ASSIGN_OR_RETURN(watch->nvml_, Nvml::Load(nvml_library));
  ASSIGN_OR_RETURN(watch->events_, watch->nvml_->ListenForXids(gpus));
  watch->thread_ = std::thread([watch = watch.get(), pci_bus_ids, on_fatal = std::move(on_fatal)] {
    watch->Listen(pci_bus_ids, on_fatal);
  });
  return watch;
}

GpuWatch::~GpuWatch() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void GpuWatch::Listen(const std::vector<std::string>& pci_bus_ids, const OnFatal& on_fatal) {
  std::vector<bool> told(pci_bus_ids.size(), false);
  while (!stopping_) {
    absl::StatusOr<std::optional<XidEvent>> event = events_->Wait(kPeriod);
    if (!event.ok()) return;  // NVML itself is gone; CUDA's errors still tell
    if (!event->has_value() || !IsFatalXid((*event)->xid)) continue;
    const auto gpu = std::find(pci_bus_ids.begin(), pci_bus_ids.end(), (*event)->pci_bus_id);
    const size_t device = static_cast<size_t>(gpu - pci_bus_ids.begin());
    if (gpu == pci_bus_ids.end() || told[device]) continue;
    told[device] = true;
    on_fatal(static_cast<int>(device),
             absl::InternalError(absl::StrCat("Xid ", (*event)->xid, " of the GPU at ", *gpu)));
  }
}

}  // namespace attnd
