// DeviceBench: an instance of a module on a GPU as what a search measures on. Before the instance's
// first call: Finish leaves the instance as it was made. One thread at a time.
#pragma once

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/layers/cuda/cuda_device.h"
#include "kernels/layers/cuda/plan_search.h"
#include "kernels/layers/executor/instance_probe.h"

namespace attnd {

class DeviceBench final : public SegmentBench {
 public:
  // The instance, on this device, outlives the bench.
  static absl::StatusOr<std::unique_ptr<DeviceBench>> Make(ExecutorInstance& instance,
                                                           CudaDevice& device, SampleClock clock);

  absl::StatusOr<double> Seconds(const SegmentPart& part, const ProductTuning& tuning,
                                 int times) override;
  absl::StatusOr<ProductLog> ProductsOf(const SegmentPart& part) override;
  bool trains() const override { return probe_->trains(); }
  absl::Status Finish() override;

 private:
  DeviceBench(std::unique_ptr<InstanceProbe> probe, CudaDevice& device, SampleClock clock)
      : probe_(std::move(probe)), device_(device), clock_(std::move(clock)) {}
  double Now() const {
    const double seconds = device_.kernel_seconds();
    return clock_ == nullptr ? seconds : clock_(seconds);
  }

  const std::unique_ptr<InstanceProbe> probe_;
  CudaDevice& device_;
  const SampleClock clock_;
};

}  // namespace attnd
