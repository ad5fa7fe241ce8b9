// TopScreen: a terminal's alternate screen, without cursor and echo, while it lives; then what
// stood there before is back, however attnctl ends but by SIGKILL. One at a time; one thread.
#pragma once

#include <termios.h>

#include <string>

#include "absl/time/time.h"

namespace attnd {

class TopScreen {
 public:
  enum class Event { kTime, kResized, kQuit };

  TopScreen();
  ~TopScreen();
  TopScreen(const TopScreen&) = delete;
  TopScreen& operator=(const TopScreen&) = delete;

  int columns() const;
  // The signal that ends the program, 0 if none has come.
  int ended_by() const;
  // Shows the lines, as many as there is room for, without the flicker of clearing first.
  void Show(const std::string& lines);
  // Until then, or until q, Esc, a signal that ends programs, or another size of the screen.
  Event WaitUntil(absl::Time time);

 private:
  Event Keys();

  bool has_keys_ = false;   // standard input is a terminal
  bool has_input_ = false;  // that has not ended
  int wake_[2] = {-1, -1};  // a pipe
  termios before_ = {};
};

}  // namespace attnd
