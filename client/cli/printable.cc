#include "client/cli/printable.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

// Bytes of the character that `text` begins with; 0 when it is a control character or no UTF-8.
size_t CharacterSize(absl::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < size) return 0;
  const absl::string_view rest = text.substr(1, size - 1);
  bool whole = std::all_of(rest.begin(), rest.end(), [](char c) { return (c & 0xc0) == 0x80; });
  // U+0080 to U+009F are control characters too; U+009B begins what ESC [ begins.
  bool control = first == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0;
  return whole && !control ? size : 0;
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string printable;
  while (!text.empty()) {
    const size_t size = CharacterSize(text);
    const size_t taken = std::max<size_t>(size, 1);
    absl::string_view character = text.substr(0, taken);
    absl::StrAppend(&printable, size > 0 ? std::string(character) : absl::CHexEscape(character));
    text.remove_prefix(taken);
  }
  return printable;
}

}  // namespace attnd
