#include "base/flag_kinds.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"

namespace attnd {
namespace {

// What a program with flags of each kind says to these words; empty: it takes them.
std::string Complaint(std::vector<std::string> words) {
  CLI::App app;
  int integer = 0;
  uint64_t seed = 0;
  double real = 0, ranged = 0;
  std::vector<int> list;
  std::string text;
  bool on = false;
  app.add_option("--integer", integer);
  app.add_option("--seed", seed);
  app.add_option("--list", list)->delimiter(',');
  app.add_option("--text", text);
  app.add_option("--ranged", ranged)->check(CLI::Range(0.0, 5.0));
  app.add_flag("--on,!--off", on);
  app.add_subcommand("command")->add_option("--real", real);
  app.set_config("--config");
  app.allow_config_extras(CLI::config_extras_mode::error);
  CheckFlagKinds(app);
  try {
    app.parse(
        std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 wants them backwards
  } catch (const CLI::ParseError& error) {
    return FlagError(error);
  }
  return "";
}

TEST(FlagKinds, WholeNumbersAreWhole) {
  for (const char* fine : {"3", "0", "-3", "+3", "0x1f"}) {
    EXPECT_EQ(Complaint({"--integer", fine}), "") << fine;
  }
  EXPECT_EQ(Complaint({"--integer", ""}), "--integer: expected a whole number, got \"\"");
  for (std::string wrong : {"two", "3s", "1.5", "1e3", "010", " 5", "0x", "--", "nan"}) {
    EXPECT_EQ(Complaint({"--integer=" + wrong}),
              "--integer: expected a whole number, got \"" + wrong + "\"");
  }
  EXPECT_EQ(Complaint({"--list", "1,x"}), "--list: expected a whole number, got \"x\"");
  EXPECT_EQ(Complaint({"--seed", "18446744073709551615"}), "");
  EXPECT_EQ(Complaint({"--seed=-1"}), "--seed: expected a whole number of 0 or above, got \"-1\"");
}

TEST(FlagKinds, WholeNumbersThatDoNotFitAreTooLarge) {
  EXPECT_EQ(Complaint({"--integer", "99999999999"}),
            "--integer: expected a number closer to 0, got \"99999999999\"");
  EXPECT_EQ(Complaint({"--seed", "18446744073709551616"}),
            "--seed: expected a number closer to 0, got \"18446744073709551616\"");
  EXPECT_EQ(Complaint({"--integer=-9223372036854775809"}),
            "--integer: expected a number closer to 0, got \"-9223372036854775809\"");
}

TEST(FlagKinds, NumbersAreNumbers) {
  for (const char* fine : {"2.5", "-1e-3", "inf"}) {
    EXPECT_EQ(Complaint({"command", "--real", fine}), "") << fine;
  }
  EXPECT_EQ(Complaint({"command", "--real", ""}), "--real: expected a number, got \"\"");
  for (std::string wrong : {"nan", "-nan", "5s", "1,5", " 5"}) {
    EXPECT_EQ(Complaint({"command", "--real=" + wrong}),
              "--real: expected a number, got \"" + wrong + "\"");
  }
  EXPECT_EQ(Complaint({"--ranged", "2"}), "");
  EXPECT_EQ(Complaint({"--ranged", "x"}), "--ranged: expected a number, got \"x\"");
}

TEST(FlagKinds, SwitchesAreOnOrOff) {
  for (const char* fine : {"--on", "--off", "--on=false", "--on=yes", "--on=0"}) {
    EXPECT_EQ(Complaint({fine}), "") << fine;
  }
  EXPECT_EQ(Complaint({"--on=maybe"}), "--on: expected true or false, got \"maybe\"");
}

TEST(FlagKinds, FilesHoldFlagsAlone) {
  const std::string path = testing::TempDir() + "/flags";
  std::ofstream(path) << "nothing = 1\n";
  EXPECT_EQ(Complaint({"--config", path}), "--config: expected flags, got nothing");
  std::ofstream(path) << "[nothing]\nlist = 1\n";
  EXPECT_EQ(Complaint({"--config", path}), "--config: expected flags, got nothing");
  std::ofstream(path) << "integer = two\n";
  EXPECT_EQ(Complaint({"--config", path}), "--integer: expected a whole number, got \"two\"");
}

TEST(FlagKinds, LeaveOtherFlagsAlone) {
  EXPECT_EQ(Complaint({"--text", "nan"}), "");
  EXPECT_EQ(Complaint({"--text", ""}), "");
}

}  // namespace
}  // namespace attnd
