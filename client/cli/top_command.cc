#include "client/cli/top_command.h"

#include <unistd.h>

#include <iostream>
#include <memory>
#include <sstream>

#include "CLI/CLI.hpp"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "client/cli/json_text.h"
#include "client/cli/top_frame.h"

namespace attnd {
namespace {

struct TopFlags {
  std::string url = "http://127.0.0.1:9464/metrics";
  double interval_seconds = 1;
  bool once = false;
};

absl::StatusOr<MetricsText> Look(const TopFlags& flags) {
  ASSIGN_OR_RETURN(std::string text, FetchMetrics(flags.url, absl::Seconds(5)));
  return MetricsText::Parse(text);
}

// A frame over a terminal's whole screen, without the flicker of clearing it first.
void Redraw(const TopFrame& frame, const TopFlags& flags, bool color) {
  std::ostringstream text;
  text << flags.url << "   every " << flags.interval_seconds << " s, Ctrl-C ends\n\n";
  frame.Print(text, color);
  std::string lines = text.str();
  for (size_t at = 0; (at = lines.find('\n', at)) != std::string::npos; at += 4) {
    lines.replace(at, 1, "\033[K\n");  // clears what the last frame had further right
  }
  std::cout << "\033[H" << lines << "\033[J" << std::flush;
}

void Show(const TopFrame& frame, const TopFlags& flags, const Session& session, bool screen) {
  if (session.json()) {
    std::cout << JsonText(frame.ToJson(), -1) << std::endl;  // one line a frame
  } else if (screen) {
    Redraw(frame, flags, session.color());
  } else {
    frame.Print(std::cout, session.color());
    std::cout << std::endl;
  }
}

absl::Status RunTop(Session& session, const TopFlags& flags) {
  bool screen = !flags.once && !session.json() && isatty(STDOUT_FILENO) != 0;
  ASSIGN_OR_RETURN(MetricsText before, Look(flags));
  absl::Time then = absl::Now();
  if (screen) std::cout << "\033[2J";
  while (true) {
    absl::SleepFor(absl::Seconds(flags.interval_seconds));
    ASSIGN_OR_RETURN(MetricsText now, Look(flags));
    absl::Time at = absl::Now();
    Show(TopFrame::Between(before, now, at - then), flags, session, screen);
    if (flags.once || !std::cout) return absl::OkStatus();
    before = std::move(now);
    then = at;
  }
}

}  // namespace

void AddTopCommand(CLI::App& app, Session& session) {
  auto flags = std::make_shared<TopFlags>();  // shared with the callback, which outlives this
  CLI::App* command = app.add_subcommand("top", "Live view of a daemon from its metrics");
  command->add_option("--metrics", flags->url, "the daemon's metrics")
      ->envname("ATTND_METRICS")
      ->check(&CheckMetricsUrl)
      ->capture_default_str();
  command->add_option("--interval", flags->interval_seconds, "seconds between frames")
      ->check(CLI::Range(0.05, 3600.0))
      ->capture_default_str();
  command->add_flag("--once", flags->once, "one frame, of one interval, then end");
  command->footer(
      "With -o json each frame is a line.\n\nExamples:\n  attnctl top\n"
      "  attnctl top --once -o json --metrics http://gpu7:9464/metrics");
  command->callback([&session, flags] {
    absl::Status status = RunTop(session, *flags);
    if (!status.ok()) session.Fail(status);
  });
}

}  // namespace attnd
