#include "client/cli/printable.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

TEST(Printable, KeepsText) {
  EXPECT_EQ(Printable("q: expected \"batch·q_heads\" \\ entries ≤ 1, 𝛼"),
            "q: expected \"batch·q_heads\" \\ entries ≤ 1, 𝛼");
  EXPECT_EQ(Printable(""), "");
}

TEST(Printable, ShowsWhatATerminalWouldObey) {
  EXPECT_EQ(Printable("a\033[2Jb"), "a\\x1b[2Jb");
  EXPECT_EQ(Printable("a\nb\rc\x7f"), "a\\nb\\rc\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "2J"),
            "\\xc2\\x9b"
            "2J");
  EXPECT_EQ(Printable(absl::string_view("\0", 1)), "\\x00");
}

TEST(Printable, ShowsBytesThatAreNoCharacters) {
  EXPECT_EQ(Printable("\x9b"
                      "2J"),
            "\\x9b"
            "2J");
  EXPECT_EQ(Printable("\xe2\x89"), "\\xe2\\x89");
  EXPECT_EQ(Printable("\xff\xc2"), "\\xff\\xc2");
}

}  // namespace
}  // namespace attnd
