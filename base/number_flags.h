// Flags that are numbers must be given numbers: CLI11 2.1 takes "" for 0, so that an unset variable
// in a script would be a limit of 0, and nan for a number that passes every range. To be called
// when all options and commands have been added, before the parse, which then fails as for any
// other wrong value. Any thread.
#pragma once

#include "CLI/App.hpp"

namespace attnd {

void RefuseEmptyNumbers(CLI::App& app);

}  // namespace attnd
