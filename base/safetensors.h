// Safetensors: reading and writing the file format (8 bytes of little-endian header length, a JSON
// header {name: {dtype, shape, data_offsets}, "__metadata__": {...}}, then the data; format as
// published at github.com/huggingface/safetensors). A file is untrusted: every number is checked
// before it is used, and nothing is allocated from a declared size beyond the file's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace attnd {

// A tensor inside a file's bytes.
struct StoredTensor {
  std::string dtype;  // "F32", "F16", "BF16", "I32", "I64", "BOOL", ...
  std::vector<int64_t> shape;
  absl::Span<const std::byte> data;

  int64_t elements() const;
};

class SafetensorsFile {
 public:
  // INVALID_ARGUMENT naming what is wrong. `bytes` is kept; tensors point into it.
  static absl::StatusOr<SafetensorsFile> Parse(std::string bytes);
  // NOT_FOUND when the file cannot be read.
  static absl::StatusOr<SafetensorsFile> Read(const std::string& path);

  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const StoredTensor* Find(const std::string& name) const;  // null: not there

 private:
  std::string bytes_;
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// A tensor of a file to be written: its data follow those of the one before it.
struct SafetensorsEntry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};

// The bytes of a file before its data, which start at a multiple of 8.
std::string SafetensorsHeader(const std::vector<SafetensorsEntry>& tensors,
                              const std::map<std::string, std::string>& metadata);

// The bytes of a whole file.
std::string SerializeSafetensors(const std::map<std::string, StoredTensor>& tensors,
                                 const std::map<std::string, std::string>& metadata);

}  // namespace attnd
