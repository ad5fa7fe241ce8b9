#include "client/cli/top_screen.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"

namespace attnd {
namespace {

constexpr char kEscape = '\033';
constexpr int kUsualColumns = 80, kUsualRows = 24;  // of a terminal that tells no size

volatile std::sig_atomic_t g_ended_by = 0, g_resized = 0;
int g_wake = -1;  // the end of the pipe that OnSignal writes to

void OnSignal(int signal) {
  const int saved = errno;
  if (signal == SIGWINCH) {
    g_resized = 1;
  } else {
    g_ended_by = signal;
  }
  [[maybe_unused]] const ssize_t written = write(g_wake, "", 1);  // a full pipe wakes too
  errno = saved;
}

winsize Size() {
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) size = {};
  if (size.ws_col == 0) size.ws_col = kUsualColumns;
  if (size.ws_row == 0) size.ws_row = kUsualRows;
  return size;
}

void HandleSignals(void (*handler)(int)) {
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGWINCH}) {
    struct sigaction action = {};
    action.sa_handler = handler;
    sigaction(signal, &action, nullptr);
  }
}

}  // namespace

TopScreen::TopScreen() {
  CHECK(pipe2(wake_, O_CLOEXEC | O_NONBLOCK) == 0);
  g_wake = wake_[1];
  HandleSignals(&OnSignal);
  has_keys_ = has_input_ = tcgetattr(STDIN_FILENO, &before_) == 0;
  if (has_keys_) {
    termios keys = before_;
    keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    keys.c_cc[VSUSP] = _POSIX_VDISABLE;  // the shell would have our screen
    keys.c_cc[VMIN] = 0;
    keys.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSANOW, &keys);
  }
  std::cout << "\033[?1049h\033[?25l\033[2J" << std::flush;
}

TopScreen::~TopScreen() {
  std::cout << "\033[?25h\033[?1049l" << std::flush;
  if (has_keys_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  HandleSignals(SIG_DFL);
  for (int fd : wake_) close(fd);
}

int TopScreen::ended_by() const { return g_ended_by; }

int TopScreen::columns() const { return Size().ws_col; }

void TopScreen::Show(const std::string& lines) {
  std::string shown = "\033[H";
  size_t begin = 0;
  for (int left = Size().ws_row; left > 0 && begin < lines.size(); --left) {
    const size_t end = std::min(lines.find('\n', begin), lines.size());
    // "\033[K" clears what the last frame had further right.
    absl::StrAppend(&shown, lines.substr(begin, end - begin), "\033[K", left > 1 ? "\n" : "");
    begin = end + 1;
  }
  std::cout << shown << "\033[J" << std::flush;
}

TopScreen::Event TopScreen::Keys() {
  char keys[64];
  const ssize_t got = read(STDIN_FILENO, keys, sizeof(keys));
  if (got <= 0) {
    has_input_ = false;
    return Event::kTime;
  }
  // Other keys send more after Escape.
  if (keys[0] == kEscape) return got == 1 ? Event::kQuit : Event::kTime;
  return std::memchr(keys, 'q', static_cast<size_t>(got)) != nullptr ? Event::kQuit : Event::kTime;
}

TopScreen::Event TopScreen::WaitUntil(absl::Time time) {
  while (true) {
    const timespec left = absl::ToTimespec(std::max(absl::ZeroDuration(), time - absl::Now()));
    pollfd ready[] = {{wake_[0], POLLIN, 0}, {has_input_ ? STDIN_FILENO : -1, POLLIN, 0}};
    const int count = ppoll(ready, 2, &left, nullptr);
    char wakes[64];
    while (read(wake_[0], wakes, sizeof(wakes)) > 0) {
    }
    if (g_ended_by != 0) return Event::kQuit;
    if (g_resized != 0) {
      g_resized = 0;
      return Event::kResized;
    }
    if (count == 0) return Event::kTime;
    if (ready[1].revents != 0 && Keys() == Event::kQuit) return Event::kQuit;
  }
}

}  // namespace attnd
