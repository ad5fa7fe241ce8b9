// FetchTensors: weights and moments of a module, all of one state, as they are kept. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/modules/module_rpcs.h"
#include "client/modules/redo_log.h"

namespace attnd {

// `sequence`: the state that is wanted; absent: whatever stands there.
// DATA_LOSS where a reply is not one.
absl::StatusOr<std::vector<SentTensor>> FetchTensors(const ModuleRpcs& rpcs,
                                                     const std::string& token,
                                                     std::optional<uint64_t> sequence,
                                                     ModuleTry& attempt);

}  // namespace attnd
