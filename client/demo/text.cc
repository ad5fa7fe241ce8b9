#include "client/demo/text.h"

#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/whole_file.h"

namespace attnd::demo {

CharacterText::CharacterText(absl::string_view text) {
  std::set<char> distinct(text.begin(), text.end());
  alphabet_.assign(distinct.begin(), distinct.end());
  tokens_.reserve(text.size());
  for (char c : text) tokens_.push_back(static_cast<int32_t>(alphabet_.find(c)));
}

absl::StatusOr<CharacterText> CharacterText::FromFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path));
  if (text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("expected text, got an empty file, ", path));
  }
  return CharacterText(text);
}

TextBatch CharacterText::RandomBatch(int64_t batch, int64_t length, std::mt19937_64& random) const {
  CHECK(length < characters()) << "a text of " << characters() << " characters";
  TextBatch out{.batch = batch, .length = length, .input = {}, .target = {}};
  for (int64_t b = 0; b < batch; ++b) {
    int64_t start = static_cast<int64_t>(random() % static_cast<uint64_t>(characters() - length));
    auto first = tokens_.begin() + start;
    out.input.insert(out.input.end(), first, first + length);
    out.target.insert(out.target.end(), first + 1, first + length + 1);
  }
  return out;
}

std::string CharacterText::Decode(const std::vector<int32_t>& tokens) const {
  std::string text;
  for (int32_t token : tokens) text.push_back(alphabet_.at(token));
  return text;
}

}  // namespace attnd::demo
