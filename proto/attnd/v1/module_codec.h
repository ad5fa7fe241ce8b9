// attnd.v1.ModuleLayout, OptimizerLayout and ModuleLimits ↔ the values of modules/, field by field.
// What the numbers may be, ModuleGraph::Make, CheckOptimizer and MakePlan check; here, only what
// those types cannot hold: sizes of the encoding, enums, options that are the call's. Errors are
// InvalidArgument "block[0].op[3].norm.kind: expected ..., got ...". Any thread.
#pragma once

#include "absl/status/statusor.h"
#include "modules/layout.h"
#include "modules/optimizer.h"
#include "modules/plan.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

absl::StatusOr<ModuleLayout> DecodeModuleLayout(const v1::ModuleLayout& wire);
v1::ModuleLayout EncodeModuleLayout(const ModuleLayout& layout);

// OptimizerSpec::kind is kNone where `wire` says so; one of the three has to be there.
absl::StatusOr<OptimizerSpec> DecodeOptimizer(const v1::OptimizerLayout& wire);
v1::OptimizerLayout EncodeOptimizer(const OptimizerSpec& spec);

absl::StatusOr<ModuleLimits> DecodeModuleLimits(const v1::ModuleLimits& wire);

}  // namespace attnd
