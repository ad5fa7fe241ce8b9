#include "base/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"
#include "base/status_macros.h"
#include "base/whole_file.h"

namespace attnd {
namespace {

using HeaderJson = nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

absl::Status WrongFile(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("safetensors: ", what));
}

// 0: not a type that we know.
int64_t DtypeBytes(const std::string& dtype) {
  const std::map<std::string, int64_t> kBytes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"U16", 2}, {"I16", 2}, {"F16", 2}, {"BF16", 2},
      {"U32", 4},  {"I32", 4}, {"F32", 4}, {"U64", 8}, {"I64", 8}, {"F64", 8}};
  auto it = kBytes.find(dtype);
  return it == kBytes.end() ? 0 : it->second;
}

// Non-negative integers only: JSON has others.
absl::StatusOr<std::vector<int64_t>> Integers(const std::string& name, const HeaderJson& list) {
  if (!list.is_array()) return WrongFile(absl::StrCat(name, ": expected a list of integers"));
  std::vector<int64_t> values;
  for (const HeaderJson& value : list) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX) {
      return WrongFile(absl::StrCat(name, ": expected integers from 0, got ", value.dump()));
    }
    values.push_back(value.get<int64_t>());
  }
  return values;
}

absl::StatusOr<int64_t> BytesOfShape(const std::string& name, const StoredTensor& tensor) {
  int64_t bytes = DtypeBytes(tensor.dtype);
  if (bytes == 0) return WrongFile(absl::StrCat(name, ": unknown dtype ", tensor.dtype));
  for (int64_t dimension : tensor.shape) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) {
      return WrongFile(absl::StrCat(name, ": its shape overflows"));
    }
  }
  return bytes;
}

struct Extent {
  int64_t begin, end;
  std::string name;
};

absl::Status ParseTensor(const std::string& name, const HeaderJson& entry,
                         absl::Span<const std::byte> data, StoredTensor& tensor,
                         std::vector<Extent>& extents) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !entry.contains("shape") || !entry.contains("data_offsets")) {
    return WrongFile(absl::StrCat(name, ": expected dtype, shape and data_offsets"));
  }
  tensor.dtype = entry["dtype"].get<std::string>();
  ASSIGN_OR_RETURN(tensor.shape, Integers(absl::StrCat(name, ".shape"), entry["shape"]));
  ASSIGN_OR_RETURN(std::vector<int64_t> offsets,
                   Integers(absl::StrCat(name, ".data_offsets"), entry["data_offsets"]));
  int64_t size = static_cast<int64_t>(data.size());
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > size) {
    return WrongFile(absl::StrCat(name, ".data_offsets: expected two numbers within 0..", size));
  }
  ASSIGN_OR_RETURN(int64_t bytes, BytesOfShape(name, tensor));
  if (bytes != offsets[1] - offsets[0]) {
    return WrongFile(absl::StrCat(name, ": expected ", bytes, " bytes by its shape, got ",
                                  offsets[1] - offsets[0]));
  }
  tensor.data = data.subspan(static_cast<size_t>(offsets[0]), static_cast<size_t>(bytes));
  extents.push_back({offsets[0], offsets[1], name});
  return absl::OkStatus();
}

absl::Status CheckOverlaps(std::vector<Extent> extents) {
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::make_pair(a.begin, a.end) < std::make_pair(b.begin, b.end);
  });
  for (size_t n = 1; n < extents.size(); ++n) {
    if (extents[n].begin < extents[n - 1].end) {
      return WrongFile(absl::StrCat(extents[n].name, " overlaps ", extents[n - 1].name));
    }
  }
  return absl::OkStatus();
}

absl::Status ParseMetadata(const HeaderJson& entry, std::map<std::string, std::string>& metadata) {
  if (!entry.is_object()) return WrongFile("__metadata__: expected an object");
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string())
      return WrongFile(absl::StrCat("__metadata__.", key, ": expected a string"));
    metadata[key] = value.get<std::string>();
  }
  return absl::OkStatus();
}

// A repeated name would hide a tensor, since the parser keeps the last one: check while it
// goes. Only names of the outermost object count.
absl::StatusOr<HeaderJson> ParseHeader(absl::string_view text) {
  std::map<std::string, int> names;
  std::string twice;
  auto callback = [&](int depth, HeaderJson::parse_event_t event, HeaderJson& value) {
    if (depth == 1 && event == HeaderJson::parse_event_t::key &&
        ++names[value.get<std::string>()] > 1) {
      twice = value.get<std::string>();
    }
    return true;
  };
  HeaderJson header =
      HeaderJson::parse(text.begin(), text.end(), callback, /*allow_exceptions=*/false);
  if (header.is_discarded() || !header.is_object())
    return WrongFile("the header is no JSON object");
  if (!twice.empty()) return WrongFile(absl::StrCat(twice, " stands twice"));
  return header;
}

}  // namespace

int64_t StoredTensor::elements() const {
  int64_t count = 1;
  for (int64_t dimension : shape) count *= dimension;  // checked when it was parsed
  return count;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Parse(std::string bytes) {
  uint64_t length;
  if (bytes.size() < kLengthBytes) return WrongFile("shorter than its header's length");
  std::memcpy(&length, bytes.data(), kLengthBytes);  // little endian, as this machine is
  if (length > kMaxHeaderBytes || length > bytes.size() - kLengthBytes) {
    return WrongFile(absl::StrCat("header of ", length, " bytes in a file of ", bytes.size()));
  }
  SafetensorsFile file;
  file.bytes_ = std::move(bytes);
  absl::string_view text(file.bytes_.data() + kLengthBytes, length);
  absl::Span<const std::byte> data(
      reinterpret_cast<const std::byte*>(file.bytes_.data()) + kLengthBytes + length,
      file.bytes_.size() - kLengthBytes - length);
  ASSIGN_OR_RETURN(HeaderJson header, ParseHeader(text));
  std::vector<Extent> extents;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      RETURN_IF_ERROR(ParseMetadata(entry, file.metadata_));
    } else {
      RETURN_IF_ERROR(ParseTensor(name, entry, data, file.tensors_[name], extents));
    }
  }
  RETURN_IF_ERROR(CheckOverlaps(std::move(extents)));
  return file;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Read(const std::string& path) {
  ASSIGN_OR_RETURN(std::string bytes, ReadWholeFile(path));
  return Parse(std::move(bytes));
}

const StoredTensor* SafetensorsFile::Find(const std::string& name) const {
  auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

std::string SafetensorsHeader(const std::vector<SafetensorsEntry>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  HeaderJson header = HeaderJson::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const SafetensorsEntry& tensor : tensors) {
    const int64_t end = offset + tensor.bytes;
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize(RoundUp(static_cast<int64_t>(text.size()), 8), ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + text;
}

std::string SerializeSafetensors(const std::map<std::string, StoredTensor>& tensors,
                                 const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    entries.push_back({name, tensor.dtype, tensor.shape, static_cast<int64_t>(tensor.data.size())});
  }
  std::string bytes = SafetensorsHeader(entries, metadata);
  for (const auto& [name, tensor] : tensors) {
    bytes.append(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
  }
  return bytes;
}

}  // namespace attnd
