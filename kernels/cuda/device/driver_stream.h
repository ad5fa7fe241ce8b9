// DriverStream: DeviceStream of a GPU: a stream of the driver's, and an event in it.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "kernels/cuda/device/device_wait.h"
#include "kernels/cuda/device/kernel_device.h"
#include "kernels/cuda/driver/handles.h"

namespace attnd::cuda {

class DriverStream final : public DeviceStream {
 public:
  // Notes what the driver says of the device, and returns it.
  using Seen = std::function<absl::Status(absl::Status)>;

  // Driver and context outlive it; the context is current.
  static absl::StatusOr<std::unique_ptr<DeviceStream>> Make(const Driver& driver,
                                                            const Context& context, Seen seen) {
    std::unique_ptr<DriverStream> made(new DriverStream(context, std::move(seen)));
    ASSIGN_OR_RETURN(made->stream_, Stream::Create(driver));
    ASSIGN_OR_RETURN(made->mark_, Event::Create(driver, /*timed=*/false));
    return made;
  }
  ~DriverStream() override {
    // Memory that its work uses goes next.
    if (Enter().ok() && Mark().ok()) seen_(WaitFor(mark_)).IgnoreError();
  }

  absl::Status Enter() override { return seen_(context_.MakeCurrent()); }
  void* raw() const override { return stream_.ref().raw(); }
  absl::Status Mark() override { return seen_(stream_.ref().Record(mark_)); }
  absl::StatusOr<bool> HasPassedMark() const override {
    absl::StatusOr<bool> passed = mark_.HasPassed();
    if (!passed.ok()) return seen_(passed.status());
    return passed;
  }

 private:
  DriverStream(const Context& context, Seen seen) : context_(context), seen_(std::move(seen)) {}

  const Context& context_;
  const Seen seen_;
  Stream stream_;
  Event mark_;
};

}  // namespace attnd::cuda
