#include "client/masks/mask_text.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/masks/mask_description.h"
#include "attention/random_problem.h"

namespace attnd::masks {
namespace {

constexpr int64_t kTextKeys = 4096;

TEST(ParseMask, ReadsEachName) {
  const Mask fixed = Window(64, 64) | Global({{0, 32}});
  const std::vector<std::pair<const char*, Mask>> cases = {
      {"all", All()},
      {"nothing", Nothing()},
      {" causal ", Causal()},
      {"window(255, 0)", Window(255, 0)},
      {"window(-1,3)", Window(-1, 3)},
      {"dilated(4,-1,16)", Dilated(4, -1, 16)},
      {"stride(64)", Stride(64, 0)},
      {"stride(64,63)", Stride(64, 63)},
      {"stride_columns(64,56,64)", StrideColumns(64, 56, 64)},
      {"block_window(64,-1,0)", BlockWindow(64, -1, 0)},
      {"global(0:64)", Global({{0, 64}})},
      {"global( 0 : 4 , 9:9,100:200, rows)",
       Global({{0, 4}, {9, 9}, {100, 200}}, GlobalDirection::kRows)},
      {"global(1:2,columns)", Global({{1, 2}}, GlobalDirection::kColumns)},
      {"prefix(100)", Prefix({100})},
      {"prefix(100,0)", Prefix({100, 0})},
      {"documents(4)", Documents({0, 1024, 2048, 3072, 4096})},
      {"documents(3)", Documents({0, 1365, 2730, 4096})},
      {"documents(0,7,7,9)", Documents({0, 7, 7, 9})},
      {"random_blocks(64,3)", RandomBlocks(64, 3, 0)},
      {"random_blocks(64,3,9)", RandomBlocks(64, 3, 9)},
      {"longformer(64,32)", fixed},
      {"bigbird(64,32,3)", fixed | RandomBlocks(64, 3, 0, false, fixed)},
      {"bigbird(64,32,3,32,7)", fixed | RandomBlocks(32, 3, 7, false, fixed)},
  };
  for (const auto& [text, expected] : cases) {
    const absl::StatusOr<Mask> mask = ParseMask(text, kTextKeys);
    ASSERT_TRUE(mask.ok()) << text << ": " << mask.status();
    EXPECT_EQ(*mask, expected) << text;
    const MaskCall call = {2, 1, kTextKeys, kTextKeys, {0}};
    EXPECT_TRUE(MaskDescription::Make(mask->Spec(), call).ok()) << text;
  }
}

TEST(ParseMask, NotBindsBeforeAndAndBeforeOr) {
  const Mask a = Causal(), b = Stride(8), c = Window(3, 3);
  const std::vector<std::pair<const char*, Mask>> cases = {
      {"causal|stride(8)&window(3,3)", a | (b & c)},
      {"causal & stride(8) | window(3,3)", (a & b) | c},
      {"causal & (stride(8) | window(3,3))", a & (b | c)},
      {"~causal & stride(8)", ~a & b},
      {"~(causal & ~ ~stride(8))", ~(a & ~~b)},
      {"causal|stride(8)|window(3,3)", a | b | c},
      {"((((causal))))", a},
  };
  for (const auto& [text, expected] : cases) {
    const absl::StatusOr<Mask> mask = ParseMask(text, kTextKeys);
    ASSERT_TRUE(mask.ok()) << text << ": " << mask.status();
    EXPECT_EQ(*mask, expected) << text;
  }
}

TEST(ParseMask, TellsWhereWhatIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "character 1: expected a mask, \"~\" or \"(\", got the end"},
      {"causal &", "character 9: expected a mask, \"~\" or \"(\", got the end"},
      {"causal stride(2)", "character 8: expected \"&\", \"|\" or the end, got \"stride(2)\""},
      {"(causal", "character 8: expected \"&\", \"|\" or \")\", got the end"},
      {"causal)", "character 7: expected \"&\", \"|\" or the end, got \")\""},
      {"causal & 7", "character 10: expected a mask, \"~\" or \"(\", got \"7\""},
      {"causal && all", "character 9: expected a mask, \"~\" or \"(\", got \"& all\""},
      {"window", "character 7: expected \"(\" of window(left,right), got the end"},
      {"window()", "character 8: expected an argument of window(left,right), got \")\""},
      {"window(1)", "character 1: expected window(left,right), got 1 arguments"},
      {"window(1,2,3)", "character 1: expected window(left,right), got more arguments"},
      {"window(1,2", "character 11: expected \",\" or \")\", got the end"},
      {"window(1 2)", "character 10: expected \",\" or \")\", got \"2)\""},
      {"window(1,-2)", "character 10: expected an integer -1..2147483647, got \"-2\""},
      {"window(1,1:2)", "character 10: expected an integer -1..2147483647, got \"1:2\""},
      {"window(rows,1)", "character 8: expected an integer -1..2147483647, got \"rows\""},
      {"window(1,9999999999)",
       "character 10: expected an integer -1..2147483647, got "
       "\"9999999999\""},
      {"window(1,99999999999999999999)",
       "character 10: expected an argument of window(left,right), got \"999999999999\""},
      {"window(--1,1)", "character 8: expected an argument of window(left,right), got \"--1,1)\""},
      {"causal()", "character 7: expected \"&\", \"|\" or the end, got \"()\""},
      {"stride(0)", "character 8: expected an integer 1..2147483647, got \"0\""},
      {"stride(4,4)", "character 10: expected an integer 0..3, got \"4\""},
      {"stride_columns(8,5,4)", "character 18: expected an integer 0..4, got \"5\""},
      {"block_window(8,1,0)", "character 18: expected an integer 1..2147483647, got \"0\""},
      {"documents(0)", "character 11: expected an integer 1..4096, got \"0\""},
      {"documents(1,2)", "character 11: expected an integer 0..0, got \"1\""},
      {"documents(0,5,4)", "character 15: expected an integer 5..2147483647, got \"4\""},
      {"global(rows)", "character 8: expected tokens begin:end, got \"rows\""},
      {"global(5)", "character 8: expected tokens begin:end from 0 on, ascending, got \"5\""},
      {"global(0:4,3:9)",
       "character 12: expected tokens begin:end from 4 on, ascending, got \"3:9\""},
      {"global(0:4,left)", "character 12: expected rows or columns, got \"left\""},
      {"global(0:4,rows,5:6)",
       "character 12: expected tokens begin:end from 4 on, ascending, got \"rows\""},
  };
  for (const auto& [text, expected] : cases) {
    const absl::Status status = ParseMask(text, kTextKeys).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_TRUE(absl::StartsWith(status.message(), expected)) << text << "\n" << status.message();
  }
  const absl::Status name = ParseMask("all | windw(1,2)", kTextKeys).status();
  EXPECT_TRUE(absl::StartsWith(name.message(), "character 7: expected a mask (all, nothing,"));
  EXPECT_TRUE(absl::EndsWith(name.message(), "got \"windw\"")) << name;
}

TEST(ParseMask, BoundsItsDepth) {
  const std::string open(100000, '('), negations(100000, '~');
  for (const std::string& text : {open, negations, negations + "all"}) {
    const absl::Status status = ParseMask(text, kTextKeys).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "at most 64 levels")) << status;
  }
  const std::string inside = std::string(64, '(') + "all" + std::string(64, ')');
  EXPECT_TRUE(ParseMask(inside + "|" + inside, kTextKeys).ok());
}

// Whatever stands in a text: a mask, or a place within the text.
TEST(ParseMask, RefusesRandomTextWithAPlaceInIt) {
  const std::vector<std::string> pieces = {
      "causal", "window",  "(",     ")",      ",",    "1",          "-1",   ":",      "&",
      "|",      "~",       " ",     "stride", "rows", "documents",  "4096", "0:64",   "global",
      "prefix", "bigbird", "(64,3", "\t",     "\xff", "4294967296", "$",    "",       "all",
      "_",      "0x10",    "1.5",   "'",      "\"",   "é",          "2:1",  "dilated"};
  Random random(7);
  int64_t accepted = 0;
  for (int64_t n = 0; n < 200000; ++n) {
    std::string text;
    for (int64_t count = random.Between(0, 14); count > 0; --count) {
      text +=
          pieces[static_cast<size_t>(random.Between(0, static_cast<int64_t>(pieces.size()) - 1))];
    }
    const absl::StatusOr<Mask> mask = ParseMask(text, kTextKeys);
    accepted += mask.ok();
    if (mask.ok()) continue;
    ASSERT_EQ(mask.status().code(), absl::StatusCode::kInvalidArgument) << text;
    size_t place = 0;
    ASSERT_EQ(std::sscanf(std::string(mask.status().message()).c_str(), "character %zu:", &place),
              1);
    ASSERT_GE(place, 1u) << text;
    ASSERT_LE(place, text.size() + 1) << text;
  }
  EXPECT_GT(accepted, 100);
}

TEST(MaskNamesHelp, NamesEachMaskThatAnErrorNames) {
  const std::string help = MaskNamesHelp();
  for (const char* name : {"causal ", "window(left,right)", "bigbird(w,g,r[,block[,seed]])"}) {
    EXPECT_TRUE(absl::StrContains(help, name)) << help;
  }
}

}  // namespace
}  // namespace attnd::masks
