// CharacterText: a text as numbers, one per character, and random pieces of it to train on. Values
// only; any thread may read.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd::demo {

// Pieces of the text and what follows each character of them, both [batch, length].
struct TextBatch {
  int64_t batch = 0, length = 0;
  std::vector<int32_t> input;
  std::vector<int32_t> target;
};

class CharacterText {
 public:
  explicit CharacterText(absl::string_view text);
  // NOT_FOUND when the file cannot be read.
  static absl::StatusOr<CharacterText> FromFile(const std::string& path);

  int64_t characters() const { return static_cast<int64_t>(tokens_.size()); }
  // Distinct characters; tokens are 0..vocabulary() − 1.
  int64_t vocabulary() const { return static_cast<int64_t>(alphabet_.size()); }
  // `length` < characters().
  TextBatch RandomBatch(int64_t batch, int64_t length, std::mt19937_64& random) const;
  std::string Decode(const std::vector<int32_t>& tokens) const;

 private:
  std::string alphabet_;  // in ascending order
  std::vector<int32_t> tokens_;
};

}  // namespace attnd::demo
