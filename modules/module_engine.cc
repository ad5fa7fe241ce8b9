#include "modules/module_engine.h"

#include <cmath>
#include <string>
#include <vector>

#include "base/status_macros.h"

namespace attnd {
namespace {

absl::Status NoReplicas() {
  return absl::UnimplementedError("replicas: the engine does not connect this module to others");
}

}  // namespace

int64_t ModuleInstance::ReplicaBytes(int) const { return 0; }
absl::Status ModuleInstance::PrepareReplicas(int) { return NoReplicas(); }
absl::StatusOr<std::string> ModuleInstance::NewGroup() { return NoReplicas(); }
absl::Status ModuleInstance::SumReplicas(const ReplicaCall&) { return NoReplicas(); }
absl::Status ModuleInstance::TakeSums() { return NoReplicas(); }

absl::StatusOr<GradientStats> ModuleInstance::Stats() {
  std::vector<double> norms(description().table.entries().size());
  RETURN_IF_ERROR(SquaredNorms(absl::MakeSpan(norms)));
  GradientStats stats;
  for (double norm : norms) stats.squared_norm += norm;
  // Squares of float32 numbers neither overflow nor cancel in float64.
  stats.is_finite = std::isfinite(stats.squared_norm);
  return stats;
}

}  // namespace attnd
