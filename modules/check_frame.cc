#include <algorithm>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "base/status_macros.h"
#include "modules/check_layout.h"
#include "modules/field_error.h"

namespace attnd {
namespace {

bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '.' || c == '-';
}

// The name itself is not repeated in the message: it may hold anything.
absl::Status CheckName(absl::string_view path, absl::string_view name, int64_t least) {
  const int64_t bytes = static_cast<int64_t>(name.size());
  if (bytes < least || bytes > kMaxModuleNameBytes) {
    return WrongField(path, absl::StrCat(least, "..", kMaxModuleNameBytes, " bytes"), bytes);
  }
  const auto wrong = std::find_if_not(name.begin(), name.end(), IsNameByte);
  if (wrong == name.end()) return absl::OkStatus();
  return WrongField(path, "bytes of [A-Za-z0-9_.-]",
                    absl::StrCat("byte ", static_cast<int>(static_cast<uint8_t>(*wrong))));
}

absl::Status CheckElements(const ModuleLayout& layout) {
  if (layout.wide_element != ElementType::kFloat32 && layout.wide_element != layout.element) {
    return WrongField("wide_element", absl::StrCat("float32 or ", ElementName(layout.element)),
                      ElementName(layout.wide_element));
  }
  return absl::OkStatus();
}

absl::Status CheckParameter(const ModuleParameter& parameter, const std::string& path) {
  RETURN_IF_ERROR(CheckName(absl::StrCat(path, ".name"), parameter.name, 1));
  if (parameter.shape.empty() || parameter.shape.size() > 2) {
    return WrongField(absl::StrCat(path, ".shape"), "1 or 2 dimensions", parameter.shape.size());
  }
  for (size_t n = 0; n < parameter.shape.size(); ++n) {
    RETURN_IF_ERROR(FieldInRange(absl::StrCat(path, ".shape[", n, "]"), parameter.shape[n], 1,
                                 kMaxParameterDimension));
  }
  return absl::OkStatus();
}

absl::Status CheckCounts(const ModuleBlock& block, const std::string& path) {
  RETURN_IF_ERROR(FieldInRange(absl::StrCat(path, ".parameter"), block.parameters.size(), 0,
                               kMaxBlockParameters));
  RETURN_IF_ERROR(FieldInRange(absl::StrCat(path, ".op"), block.ops.size(), 1, kMaxBlockOps));
  for (size_t n = 0; n < block.parameters.size(); ++n) {
    RETURN_IF_ERROR(CheckParameter(block.parameters[n], absl::StrCat(path, ".parameter[", n, "]")));
  }
  return absl::OkStatus();
}

absl::Status CheckFrozen(const ModuleLayer& layer, int64_t parameters, const std::string& path) {
  for (size_t n = 0; n < layer.frozen.size(); ++n) {
    const std::string entry = absl::StrCat(path, ".frozen[", n, "]");
    RETURN_IF_ERROR(FieldInRange(entry, layer.frozen[n], 0, parameters - 1));
    if (n > 0 && layer.frozen[n] <= layer.frozen[n - 1]) {
      return WrongField(entry, absl::StrCat("above ", layer.frozen[n - 1]), layer.frozen[n]);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLayer(const ModuleLayout& layout, int64_t number) {
  const ModuleLayer& layer = layout.layers[number];
  const std::string path = absl::StrCat("layer[", number, "]");
  RETURN_IF_ERROR(FieldInRange(absl::StrCat(path, ".block"), layer.block, 0,
                               static_cast<int64_t>(layout.blocks.size()) - 1));
  RETURN_IF_ERROR(CheckName(absl::StrCat(path, ".prefix"), layer.prefix, 0));
  return CheckFrozen(layer, layout.blocks[layer.block].parameters.size(), path);
}

// Parameters have at most 2^40 numbers each, and there are at most 2^15: no sum overflows.
absl::Status CheckTotal(const ModuleLayout& layout) {
  int64_t total = 0;
  for (const ModuleLayer& layer : layout.layers) {
    for (const ModuleParameter& parameter : layout.blocks[layer.block].parameters) {
      total += parameter.shape[0] * (parameter.shape.size() == 2 ? parameter.shape[1] : 1);
    }
  }
  if (total <= kMaxModuleElements) return absl::OkStatus();
  return WrongField("layer", absl::StrCat("at most ", kMaxModuleElements, " numbers in parameters"),
                    total);
}

absl::Status CheckNamesDiffer(const ModuleLayout& layout) {
  absl::flat_hash_set<std::string> names;
  for (size_t n = 0; n < layout.layers.size(); ++n) {
    const ModuleLayer& layer = layout.layers[n];
    for (const ModuleParameter& parameter : layout.blocks[layer.block].parameters) {
      std::string name = absl::StrCat(layer.prefix, parameter.name);
      if (!names.insert(name).second) {
        return WrongField(absl::StrCat("layer[", n, "].prefix"),
                          "names of parameters that differ from all others",
                          absl::StrCat("\"", name, "\" again"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckFrame(const ModuleLayout& layout) {
  RETURN_IF_ERROR(FieldInRange("width", layout.width, kModuleWidthStep, kMaxModuleWidth));
  if (layout.width % kModuleWidthStep != 0) {
    return WrongField("width", absl::StrCat("a multiple of ", kModuleWidthStep), layout.width);
  }
  RETURN_IF_ERROR(FieldInRange("memory_width", layout.memory_width, 0, kMaxModuleWidth));
  RETURN_IF_ERROR(CheckElements(layout));
  RETURN_IF_ERROR(FieldInRange("block", layout.blocks.size(), 1, kMaxModuleBlocks));
  RETURN_IF_ERROR(FieldInRange("layer", layout.layers.size(), 1, kMaxModuleLayers));
  for (size_t n = 0; n < layout.blocks.size(); ++n) {
    RETURN_IF_ERROR(CheckCounts(layout.blocks[n], absl::StrCat("block[", n, "]")));
  }
  for (size_t n = 0; n < layout.layers.size(); ++n) RETURN_IF_ERROR(CheckLayer(layout, n));
  RETURN_IF_ERROR(CheckTotal(layout));
  return CheckNamesDiffer(layout);
}

}  // namespace attnd
