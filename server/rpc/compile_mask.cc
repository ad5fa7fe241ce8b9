#include "server/rpc/compile_mask.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "attention/mask_plans.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/wire/decode_problem.h"

namespace attnd {
namespace {

// The tiles that a device visits in one direction.
absl::Status DescribeTiles(const MaskCompileOptions& options, const Problem& problem,
                           MaskPlans& plans, v1::MaskOnDevice& report) {
  ASSIGN_OR_RETURN(const auto compiled, plans.Get(problem, options));
  const MaskTotals totals = TotalsOf(*compiled, problem);
  report.set_tile_rows(static_cast<uint32_t>(options.tile.rows));
  report.set_tile_keys(static_cast<uint32_t>(options.tile.keys));
  report.set_tiles(static_cast<uint64_t>(totals.tiles));
  report.set_tiles_full(static_cast<uint64_t>(totals.tiles_full));
  report.set_tiles_partial(static_cast<uint64_t>(totals.tiles_partial));
  report.set_distinct_bitmaps(static_cast<uint64_t>(totals.distinct_bitmaps));
  report.set_plan_bytes(static_cast<uint64_t>(compiled->bytes()));
  report.set_compile_nanoseconds(static_cast<uint64_t>(compiled->compile_nanoseconds()));
  return absl::OkStatus();
}

// A device that cannot run the mask says why.
absl::Status Describe(const NamedEngine& device, const Problem& problem, MaskPlans& plans,
                      v1::MaskOnDevice& report) {
  ASSIGN_OR_RETURN(const MaskKernel forward,
                   device.engine->KernelForMask(problem, Direction::kForward));
  ASSIGN_OR_RETURN(const MaskKernel backward,
                   device.engine->KernelForMask(problem, Direction::kBackward));
  report.set_kernel_forward(forward.kernel);
  report.set_kernel_backward(backward.kernel);
  report.set_reason(forward.reason);
  return DescribeTiles(forward.plan, problem, plans, report);
}

}  // namespace

absl::StatusOr<v1::CompileMaskResponse> CompileMask(SmallCall& call, const ServiceDeps& deps) {
  v1::CompileMaskRequest wire;
  RETURN_IF_ERROR(call.Decode(wire));
  const auto read = [&wire](int64_t bytes) -> absl::StatusOr<std::string> {
    if (static_cast<int64_t>(wire.mask_data().size()) == bytes) return wire.mask_data();
    return FieldError(reason::kSizeMismatch, "mask_data", absl::StrCat(bytes, " bytes"),
                      absl::StrCat(wire.mask_data().size(), " bytes"));
  };
  ASSIGN_OR_RETURN(const DecodedProblem decoded,
                   DecodeProblem(wire.problem(), {deps.keep.masks(), call.caller()}, read));
  if (decoded.mask_data_bytes == 0) {
    RETURN_IF_ERROR(RefuseMaskData(static_cast<int64_t>(wire.mask_data().size())));
  }
  const Problem& problem = decoded.problem;
  if (problem.mask == nullptr) {
    return FieldError(reason::kBadField, "problem.mask", "a mask", "none");
  }
  const MaskTotals totals = TotalsOf(*decoded.plan, problem);
  v1::CompileMaskResponse reply;
  reply.set_id(problem.mask->id().data(), problem.mask->id().size());
  reply.set_bytes_held(static_cast<uint64_t>(problem.mask->bytes() + decoded.plan->bytes()));
  reply.set_visible(static_cast<uint64_t>(totals.visible));
  reply.set_empty_rows(static_cast<uint64_t>(totals.empty_rows));
  reply.set_tiles_full(static_cast<uint64_t>(totals.tiles_full));
  reply.set_tiles_partial(static_cast<uint64_t>(totals.tiles_partial));
  for (const NamedEngine& device : deps.engines) {
    v1::MaskOnDevice& report = *reply.add_device();
    report.set_device(device.name);
    const absl::Status status = Describe(device, problem, deps.keep.masks().plans(), report);
    if (!status.ok()) report.set_reason(std::string(status.message()));
  }
  return reply;
}

}  // namespace attnd
