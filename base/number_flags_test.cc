#include "base/number_flags.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "CLI/CLI.hpp"

namespace attnd {
namespace {

// What a program with flags of each kind says to a value of one; empty: it takes it.
std::string Complaint(const std::string& flag, const std::string& value) {
  CLI::App app;
  int integer = 0;
  double real = 0, ranged = 0;
  std::string text;
  app.add_option("--integer", integer);
  app.add_option("--text", text);
  app.add_option("--ranged", ranged)->check(CLI::Range(0.0, 5.0));
  app.add_subcommand("command")->add_option("--real", real);
  RefuseEmptyNumbers(app);
  std::vector<std::string> words = {value, flag};  // CLI11 wants them backwards
  if (flag == "--real") words.push_back("command");
  try {
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
  return "";
}

TEST(NumberFlags, MustBeNumbers) {
  EXPECT_EQ(Complaint("--integer", "3"), "");
  EXPECT_EQ(Complaint("--integer", ""), "--integer: expected a number, got \"\"");
  EXPECT_EQ(Complaint("--real", "2.5"), "");
  EXPECT_EQ(Complaint("--real", "nan"), "--real: expected a number, got \"nan\"");
  EXPECT_EQ(Complaint("--ranged", "2"), "");
  EXPECT_EQ(Complaint("--ranged", "-nan"), "--ranged: expected a number, got \"-nan\"");
}

TEST(NumberFlags, LeaveOtherFlagsAlone) {
  EXPECT_EQ(Complaint("--text", "nan"), "");
  EXPECT_EQ(Complaint("--text", ""), "");
}

}  // namespace
}  // namespace attnd
