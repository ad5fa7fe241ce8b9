#include "modules/module_engine.h"

#include <cmath>
#include <vector>

#include "base/status_macros.h"

namespace attnd {

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
