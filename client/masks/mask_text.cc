#include "client/masks/mask_text.h"

#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace attnd::masks {
namespace {

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
constexpr int kMaxNesting = 64;  // a mask has at most 16 levels; this bounds our own recursion

absl::Status Wrong(size_t at, absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(
      absl::StrCat("character ", at + 1, ": expected ", expected, ", got ", got));
}

std::string Quoted(absl::string_view text) { return absl::StrCat("\"", text, "\""); }

// A number, an interval begin:end, or a word, which begins `at` a character of the text.
struct Argument {
  size_t at = 0;
  absl::string_view text;
  bool is_word = false, is_interval = false;
  int64_t begin = 0, end = 0;  // a number: begin
};

// The arguments of one name. Its readers remember the first thing that is wrong.
class Arguments {
 public:
  Arguments(size_t at, std::vector<Argument> all, int64_t keys)
      : at_(at), all_(std::move(all)), keys_(keys) {}

  size_t count() const { return all_.size(); }
  int64_t keys() const { return keys_; }
  const absl::Status& status() const { return status_; }
  size_t at(size_t n) const { return n < all_.size() ? all_[n].at : at_; }

  template <class Number = int64_t>
  Number Integer(size_t n, int64_t low, int64_t high) {
    if (n >= all_.size() || !status_.ok()) return static_cast<Number>(low);
    const Argument& a = all_[n];
    if (!a.is_word && !a.is_interval && a.begin >= low && a.begin <= high) {
      return static_cast<Number>(a.begin);
    }
    Refuse(n, absl::StrCat("an integer ", low, "..", high));
    return static_cast<Number>(low);
  }
  int32_t Bound(size_t n) { return Integer<int32_t>(n, -1, kMax); }
  uint32_t Period(size_t n) { return Integer<uint32_t>(n, 1, kMax); }

  // All arguments but a last word: ascending, disjoint.
  std::vector<Interval> Intervals() {
    std::vector<Interval> intervals;
    int64_t before = 0;
    for (size_t n = 0; n < all_.size() - (LastIsWord() ? 1 : 0); ++n) {
      const Argument& a = all_[n];
      if (!a.is_interval || a.begin < before || a.end < a.begin || a.end > kMax) {
        Refuse(n, absl::StrCat("tokens begin:end from ", before, " on, ascending"));
        break;
      }
      intervals.push_back({static_cast<uint32_t>(a.begin), static_cast<uint32_t>(a.end)});
      before = a.end;
    }
    if (intervals.empty()) Refuse(0, "tokens begin:end");
    return intervals;
  }

  bool LastIsWord() const { return !all_.empty() && all_.back().is_word; }
  absl::string_view Last() const { return all_.back().text; }
  void Refuse(size_t n, absl::string_view expected) {
    if (!status_.ok()) return;
    status_ = Wrong(at(n), expected, n < all_.size() ? Quoted(all_[n].text) : "nothing");
  }

 private:
  const size_t at_;  // of the name
  const std::vector<Argument> all_;
  const int64_t keys_;
  absl::Status status_;
};

Mask GlobalOf(Arguments& in) {
  GlobalDirection direction = GlobalDirection::kBoth;
  if (in.LastIsWord() && in.Last() == "rows") {
    direction = GlobalDirection::kRows;
  } else if (in.LastIsWord() && in.Last() == "columns") {
    direction = GlobalDirection::kColumns;
  } else if (in.LastIsWord()) {
    in.Refuse(in.count() - 1, "rows or columns");
  }
  return Global(in.Intervals(), direction);
}

// One argument: so many documents of equal length; several: where each begins.
Mask DocumentsOf(Arguments& in) {
  std::vector<uint32_t> cu;
  if (in.count() == 1) {
    const int64_t count = in.Integer(0, 1, in.keys());
    for (int64_t n = 0; n <= count; ++n) {
      cu.push_back(static_cast<uint32_t>(in.keys() * n / count));
    }
    return Documents(std::move(cu));
  }
  for (size_t n = 0; n < in.count(); ++n) {
    cu.push_back(in.Integer<uint32_t>(n, n == 0 ? 0 : cu.back(), n == 0 ? 0 : kMax));
  }
  return Documents(std::move(cu));
}

Mask PrefixOf(Arguments& in) {
  std::vector<uint32_t> lengths;
  for (size_t n = 0; n < in.count(); ++n) lengths.push_back(in.Integer<uint32_t>(n, 0, kMax));
  return Prefix(std::move(lengths));
}

Mask StrideColumnsOf(Arguments& in) {
  const uint32_t p = in.Period(0), hi = in.Integer<uint32_t>(2, 0, p);
  return StrideColumns(p, in.Integer<uint32_t>(1, 0, hi), hi);
}

Mask BlockWindowOf(Arguments& in) {
  const int32_t lo = in.Integer<int32_t>(1, -kMax, kMax);
  return BlockWindow(in.Period(0), lo, in.Integer<int32_t>(2, lo, kMax));
}

Mask RandomBlocksOf(Arguments& in) {
  return RandomBlocks(in.Period(0), in.Integer<uint32_t>(1, 0, kMax),
                      in.Integer<uint64_t>(2, 0, kMax));
}

Mask Longformer(Arguments& in) {
  return Window(in.Bound(0), in.Bound(0)) | Global({{0, in.Integer<uint32_t>(1, 0, kMax)}});
}

// The random blocks are drawn among those that window and globals do not hold anyway.
Mask BigBird(Arguments& in) {
  const Mask fixed = Longformer(in);
  const uint32_t block = in.count() > 3 ? in.Period(3) : 64;
  return fixed | RandomBlocks(block, in.Integer<uint32_t>(2, 0, kMax),
                              in.Integer<uint64_t>(4, 0, kMax), false, fixed);
}

struct Name {
  absl::string_view name, arguments, shows;
  size_t least, most;  // arguments
  Mask (*make)(Arguments& in);
};

constexpr size_t kAny = 1 << 16;
constexpr Name kNames[] = {
    {"all", "", "every key", 0, 0, [](Arguments&) { return All(); }},
    {"nothing", "", "no key", 0, 0, [](Arguments&) { return Nothing(); }},
    {"causal", "", "keys up to the row's own position", 0, 0, [](Arguments&) { return Causal(); }},
    {"window", "left,right", "so many keys before and behind it; -1: all", 2, 2,
     [](Arguments& in) { return Window(in.Bound(0), in.Bound(1)); }},
    {"dilated", "step,left,right", "every step-th key, so many on each side", 3, 3,
     [](Arguments& in) { return Dilated(in.Period(0), in.Bound(1), in.Bound(2)); }},
    {"stride", "p[,phase]", "(row - key) mod p = phase", 1, 2,
     [](Arguments& in) {
       const uint32_t p = in.Period(0);
       return Stride(p, in.Integer<uint32_t>(1, 0, int64_t{p} - 1));
     }},
    {"stride_columns", "p,lo,hi", "lo <= key mod p < hi", 3, 3, StrideColumnsOf},
    {"block_window", "p,lo,hi", "blocks of p keys, lo to hi from the row's own", 3, 3,
     BlockWindowOf},
    {"global", "begin:end,...[,rows|columns]", "these tokens' rows and columns", 1, kAny, GlobalOf},
    {"prefix", "length,...", "the first keys; one, or one for each batch entry", 1, kAny, PrefixOf},
    {"documents", "count", "keys of the row's own of so many equal documents", 1, kAny,
     DocumentsOf},
    {"random_blocks", "block,per_row[,seed]", "per_row blocks drawn in each row of blocks", 2, 3,
     RandomBlocksOf},
    {"longformer", "w,g", "window(w,w) | global(0:g)", 2, 2, Longformer},
    {"bigbird", "w,g,r[,block[,seed]]", "longformer(w,g) and r other random blocks of 64", 3, 5,
     BigBird},
};

std::string Spelling(const Name& name) {
  if (name.most == 0) return std::string(name.name);
  return absl::StrCat(name.name, "(", name.arguments, ")");
}

class Parser {
 public:
  Parser(absl::string_view text, int64_t keys) : text_(text), keys_(keys) { SkipSpace(); }

  absl::StatusOr<Mask> ParseAll() {
    ASSIGN_OR_RETURN(Mask mask, ParseEither());
    if (at_ < text_.size()) return Expected("\"&\", \"|\" or the end");
    return mask;
  }

 private:
  absl::StatusOr<Mask> ParseEither() {
    ASSIGN_OR_RETURN(Mask mask, ParseBoth());
    while (Take('|')) {
      ASSIGN_OR_RETURN(const Mask other, ParseBoth());
      mask = mask | other;
    }
    return mask;
  }

  absl::StatusOr<Mask> ParseBoth() {
    ASSIGN_OR_RETURN(Mask mask, ParseFactor());
    while (Take('&')) {
      ASSIGN_OR_RETURN(const Mask other, ParseFactor());
      mask = mask & other;
    }
    return mask;
  }

  absl::StatusOr<Mask> ParseFactor() {
    const size_t begin = at_;
    if (!Take('~') && !Take('(')) return ParseName();
    if (++nesting_ > kMaxNesting) {
      return Wrong(begin, absl::StrCat("at most ", kMaxNesting, " levels of ( and ~"), "more");
    }
    const bool negates = text_[begin] == '~';
    ASSIGN_OR_RETURN(Mask mask, negates ? ParseFactor() : ParseEither());
    if (!negates && !Take(')')) return Expected("\"&\", \"|\" or \")\"");
    --nesting_;
    return negates ? ~std::move(mask) : mask;
  }

  absl::StatusOr<Mask> ParseName() {
    const size_t begin = at_;
    const absl::string_view word = TakeWord();
    if (word.empty()) return Expected("a mask, \"~\" or \"(\"");
    for (const Name& name : kNames) {
      if (name.name == word) return ParseArguments(name, begin);
    }
    return Wrong(begin, absl::StrCat("a mask (", absl::StrJoin(kNames, ", ", AppendName), ")"),
                 Quoted(word));
  }

  absl::StatusOr<Mask> ParseArguments(const Name& name, size_t begin) {
    std::vector<Argument> all;
    if (name.most > 0 && !Take('(')) return Expected(absl::StrCat("\"(\" of ", Spelling(name)));
    while (name.most > 0) {
      ASSIGN_OR_RETURN(Argument argument, ParseArgument(name));
      all.push_back(argument);
      if (all.size() > name.most) break;
      if (Take(')')) break;
      if (!Take(',')) return Expected("\",\" or \")\"");
    }
    if (all.size() < name.least || all.size() > name.most) {
      return Wrong(
          begin, Spelling(name),
          all.size() > name.most ? "more arguments" : absl::StrCat(all.size(), " arguments"));
    }
    Arguments arguments(begin, std::move(all), keys_);
    Mask mask = name.make(arguments);
    if (!arguments.status().ok()) return arguments.status();
    return mask;
  }

  absl::StatusOr<Argument> ParseArgument(const Name& name) {
    Argument argument{.at = at_};
    argument.is_word = !TakeWord().empty();
    if (!argument.is_word) {
      RETURN_IF_ERROR(ParseInteger(name, argument.begin));
      argument.is_interval = Take(':');
      if (argument.is_interval) RETURN_IF_ERROR(ParseInteger(name, argument.end));
    }
    argument.text = absl::StripAsciiWhitespace(text_.substr(argument.at, at_ - argument.at));
    return argument;
  }

  absl::Status ParseInteger(const Name& name, int64_t& number) {
    const size_t begin = at_;
    if (at_ < text_.size() && text_[at_] == '-') ++at_;
    while (at_ < text_.size() && absl::ascii_isdigit(text_[at_])) ++at_;
    const absl::string_view digits = text_.substr(begin, at_ - begin);
    if (!absl::SimpleAtoi(digits, &number)) {
      at_ = begin;
      return Expected(absl::StrCat("an argument of ", Spelling(name)));
    }
    SkipSpace();
    return absl::OkStatus();
  }

  absl::string_view TakeWord() {
    const size_t begin = at_;
    if (at_ < text_.size() && absl::ascii_isdigit(text_[at_])) return "";
    while (at_ < text_.size() && (absl::ascii_isalnum(text_[at_]) || text_[at_] == '_')) ++at_;
    const absl::string_view word = text_.substr(begin, at_ - begin);
    SkipSpace();
    return word;
  }

  bool Take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    SkipSpace();
    return true;
  }
  void SkipSpace() {
    while (at_ < text_.size() && absl::ascii_isspace(text_[at_])) ++at_;
  }
  // Returns the error that something else stands here.
  absl::Status Expected(absl::string_view expected) const {
    return Wrong(at_, expected, at_ < text_.size() ? Quoted(text_.substr(at_, 12)) : "the end");
  }
  static void AppendName(std::string* out, const Name& name) {
    out->append(name.name.data(), name.name.size());
  }

  const absl::string_view text_;
  const int64_t keys_;
  size_t at_ = 0;
  int nesting_ = 0;
};

}  // namespace

absl::StatusOr<Mask> ParseMask(absl::string_view text, int64_t keys) {
  return Parser(text, keys).ParseAll();
}

std::string MaskNamesHelp() {
  std::string help;
  for (const Name& name : kNames) {
    absl::StrAppendFormat(&help, "  %-38s %s\n", Spelling(name), name.shows);
  }
  return help;
}

}  // namespace attnd::masks
