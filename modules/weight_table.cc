#include "modules/weight_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"

namespace attnd {

int64_t WeightTable::BytesOf(const ModuleGraph& graph) {
  constexpr size_t kEntryBytes = sizeof(WeightEntry) + 256;  // with shape, names' blocks and index
  size_t bytes = 0;
  for (size_t layer = 0; layer < graph.layout().layers.size(); ++layer) {
    const size_t prefix = graph.layout().layers[layer].prefix.size();
    for (const ModuleParameter& parameter : graph.BlockOf(layer).parameters) {
      bytes += kEntryBytes + 2 * (prefix + parameter.name.size());
    }
  }
  return static_cast<int64_t>(bytes);
}

WeightTable::WeightTable(const ModuleGraph& graph) {
  size_t count = 0;
  for (size_t layer = 0; layer < graph.layout().layers.size(); ++layer) {
    count += graph.BlockOf(layer).parameters.size();
  }
  entries_.reserve(count);
  by_name_.reserve(count);
  for (size_t layer = 0; layer < graph.layout().layers.size(); ++layer) {
    const ModuleLayer& of = graph.layout().layers[layer];
    const std::vector<ModuleParameter>& parameters = graph.BlockOf(layer).parameters;
    first_.push_back(static_cast<int64_t>(entries_.size()));
    for (size_t n = 0; n < parameters.size(); ++n) {
      WeightEntry entry{.name = absl::StrCat(of.prefix, parameters[n].name),
                        .layer = static_cast<int64_t>(layer),
                        .parameter = static_cast<int64_t>(n),
                        .shape = parameters[n].shape,
                        .elements = 1,
                        .offset = elements_};
      for (int64_t dimension : entry.shape) entry.elements *= dimension;
      const int64_t room = RoundUp(entry.elements, kWeightAlignment);
      elements_ += room;
      if (entry.is_matrix()) matrix_elements_ += room;
      if (!std::binary_search(of.frozen.begin(), of.frozen.end(), static_cast<int64_t>(n))) {
        entry.trained_offset = trained_elements_;
        trained_elements_ += room;
      }
      by_name_.emplace(entry.name, static_cast<int64_t>(entries_.size()));
      entries_.push_back(std::move(entry));
    }
  }
}

const WeightEntry* WeightTable::Find(absl::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

}  // namespace attnd
