#include "kernels/layers/cuda/device_bench.h"

#include "base/status_macros.h"

namespace attnd {

absl::StatusOr<std::unique_ptr<DeviceBench>> DeviceBench::Make(ExecutorInstance& instance,
                                                               CudaDevice& device,
                                                               SampleClock clock) {
  ASSIGN_OR_RETURN(std::unique_ptr<InstanceProbe> probe, InstanceProbe::Make(instance));
  return std::unique_ptr<DeviceBench>(new DeviceBench(std::move(probe), device, std::move(clock)));
}

absl::StatusOr<double> DeviceBench::Seconds(const SegmentPart& part, const ProductTuning& tuning,
                                            int times) {
  device_.Tune(tuning);
  const double begin = Now();
  RETURN_IF_ERROR(probe_->Run(part.block, part.direction, part.segments, times));
  return Now() - begin;
}

absl::StatusOr<ProductLog> DeviceBench::ProductsOf(const SegmentPart& part) {
  ProductLog log;
  device_.Tune({});
  device_.LogProducts(&log);
  const absl::Status status = probe_->Run(part.block, part.direction, part.segments, 1);
  device_.LogProducts(nullptr);
  RETURN_IF_ERROR(status);
  return log;
}

absl::Status DeviceBench::Finish() {
  device_.Tune({});
  return probe_->Clear();
}

}  // namespace attnd
