#include "kernels/layers/cuda/plan_cache.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/read_file.h"
#include "kernels/cuda/library/kernel_cache.h"
#include "nlohmann/json.hpp"

namespace attnd {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMostNumber = int64_t{1} << 31;
constexpr std::pair<KernelKind, const char*> kProductKinds[] = {
    {KernelKind::kProductRowsRows, "rows_rows"},
    {KernelKind::kProductRowsDepth, "rows_depth"},
    {KernelKind::kProductDepthDepth, "depth_depth"}};

// A whole number of [0, 2³¹).
std::optional<int64_t> NumberIn(const Json& json) {
  if (!json.is_number_unsigned() || json.get<uint64_t>() >= uint64_t{kMostNumber}) {
    return std::nullopt;
  }
  return json.get<int64_t>();
}
std::optional<int64_t> NumberOf(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() ? std::nullopt : NumberIn(*found);
}
// Absent: as predicted.
std::optional<bool> FlagOf(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_boolean()) return std::nullopt;
  return found->get<bool>();
}

std::optional<SegmentEnds> EndsOf(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_array()) return std::nullopt;
  SegmentEnds ends;
  for (const Json& end : *found) {
    const std::optional<int64_t> number = NumberIn(end);
    if (!number.has_value()) return std::nullopt;
    ends.push_back(*number);
  }
  return ends;
}

std::optional<std::pair<ProductKey, ProductChoice>> ProductOf(const Json& json) {
  if (!json.is_object()) return std::nullopt;
  const auto name = json.find("kind");
  const auto* kind =
      std::find_if(std::begin(kProductKinds), std::end(kProductKinds), [&](const auto& of) {
        return name != json.end() && name->is_string() && *name == of.second;
      });
  const std::optional<int64_t> columns = NumberOf(json, "columns"), other = NumberOf(json, "other");
  const int64_t gradient_columns = NumberOf(json, "gradient_columns").value_or(0);
  const bool is_there = gradient_columns == 0 || gradient_columns == kNarrowGradientColumns ||
                        gradient_columns == kWideGradientColumns;
  if (kind == std::end(kProductKinds) || !columns.has_value() || !other.has_value() || !is_there) {
    return std::nullopt;
  }
  return std::pair{ProductKey{kind->first, *columns, *other},
                   ProductChoice{.small = FlagOf(json, "small"),
                                 .gradient_columns = static_cast<int32_t>(gradient_columns),
                                 .apart = FlagOf(json, "apart").value_or(false)}};
}

Json JsonOf(const ProductKey& key, const ProductChoice& choice) {
  const auto* kind = std::find_if(std::begin(kProductKinds), std::end(kProductKinds),
                                  [&](const auto& of) { return key.kind == of.first; });
  Json json = {{"kind", kind->second}, {"columns", key.columns}, {"other", key.other}};
  if (choice.small.has_value()) json["small"] = *choice.small;
  if (choice.gradient_columns != 0) json["gradient_columns"] = choice.gradient_columns;
  if (choice.apart) json["apart"] = true;
  return json;
}

std::string PathIn(const std::string& directory) {
  const std::string folder = KernelCache(directory).directory();
  return folder.empty() ? "" : absl::StrCat(folder, "/plans.jsonl");
}

}  // namespace

std::string FormatPlanLine(const std::string& key, const BlockChoice& choice) {
  Json line = {{"key", key}, {"forward", choice.ends.forward}, {"backward", choice.ends.backward}};
  for (const auto& [product, of] : choice.products) line["products"].push_back(JsonOf(product, of));
  return line.dump();
}

std::optional<std::pair<std::string, BlockChoice>> ParsePlanLine(absl::string_view line) {
  if (line.size() > PlanCache::kMostLineBytes) return std::nullopt;
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  const auto key = json.find("key"), products = json.find("products");
  const std::optional<SegmentEnds> forward = EndsOf(json, "forward");
  const std::optional<SegmentEnds> backward = EndsOf(json, "backward");
  if (key == json.end() || !key->is_string() || !forward.has_value() || !backward.has_value()) {
    return std::nullopt;
  }
  BlockChoice choice = {{*forward, *backward}, {}};
  if (products != json.end()) {
    if (!products->is_array()) return std::nullopt;
    for (const Json& product : *products) {
      const auto read = ProductOf(product);
      if (!read.has_value()) return std::nullopt;
      choice.products.insert(*read);
    }
  }
  return std::pair{key->get<std::string>(), std::move(choice)};
}

PlanCache::PlanCache(const std::string& directory) : path_(PathIn(directory)) {}

// As much as the file may have.
std::string PlanCache::Lines() const {
  if (path_.empty() || !IsRegularFile(path_)) return "";
  std::ifstream file(path_, std::ios::binary);
  std::string bytes(kMostLines * (kMostLineBytes + 1), '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<size_t>(file.gcount()));
  return bytes;
}

std::optional<BlockChoice> PlanCache::Get(const std::string& key) const {
  const std::string bytes = Lines();
  for (absl::string_view line : absl::StrSplit(bytes, '\n', absl::SkipEmpty())) {
    auto read = ParsePlanLine(line);
    if (read.has_value() && read->first == key) return std::move(read->second);
  }
  return std::nullopt;
}

absl::Status PlanCache::Put(const std::string& key, const BlockChoice& choice) {
  if (path_.empty()) return absl::InternalError("no cache folder: HOME is not set");
  const std::string first = FormatPlanLine(key, choice);
  if (first.size() > kMostLineBytes) {
    return absl::InternalError(absl::StrCat("a plan of ", first.size(), " bytes is not kept"));
  }
  const absl::MutexLock lock(&mutex_);
  const std::string bytes = Lines();
  std::string lines = first + "\n";
  size_t count = 1;
  for (absl::string_view line : absl::StrSplit(bytes, '\n', absl::SkipEmpty())) {
    const auto read = ParsePlanLine(line);
    if (!read.has_value() || read->first == key || count == kMostLines) continue;
    absl::StrAppend(&lines, line, "\n");
    ++count;
  }
  return ReplaceFile(path_, lines);
}

}  // namespace attnd
