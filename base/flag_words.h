// FlagWords: a command line as CLI::App::parse takes it, in reverse order. CLI11 alone reads
// "--flag=", as an unset variable in a script leaves it, as a flag whose value is the next word.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace attnd {

// "--flag=" becomes "--flag" and an empty word; what follows "--" stays as it is.
inline std::vector<std::string> FlagWords(int argc, const char* const* argv) {
  std::vector<std::string> words;
  bool flags = true;
  for (int n = 1; n < argc; ++n) {
    std::string word = argv[n];
    flags &= word != "--";
    const bool empty =
        flags && word.size() > 3 && word.rfind("--", 0) == 0 && word.find('=') == word.size() - 1;
    if (empty) word.pop_back();
    words.push_back(word);
    if (empty) words.emplace_back();
  }
  std::reverse(words.begin(), words.end());
  return words;
}

}  // namespace attnd
