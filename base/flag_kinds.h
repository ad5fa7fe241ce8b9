// Flags of the wrong kind, told as every other wrong value: "--slots: expected a whole number, got
// "two"". CLI11 2.1 alone says "Could not convert: --slots = two", takes "" for 0, so that an unset
// variable in a script would be a limit of 0, 010 for 8, -1 for a seed of 2^64 - 1, and nan for a
// number that passes every range. Any thread.
#pragma once

#include <string>

#include "CLI/App.hpp"

namespace attnd {

// To be called when all options and commands have been added, before the parse, which then fails as
// for any other wrong value.
void CheckFlagKinds(CLI::App& app);

// What to tell of a command line (or a file of flags) that did not parse.
std::string FlagError(const CLI::Error& error);

}  // namespace attnd
