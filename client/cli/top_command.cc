#include "client/cli/top_command.h"

#include <unistd.h>

#include <csignal>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include "CLI/CLI.hpp"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "client/cli/json_text.h"
#include "client/cli/table.h"
#include "client/cli/top_frame.h"
#include "client/cli/top_screen.h"

namespace attnd {
namespace {

constexpr int kFileColumns = 100;  // where there is no screen

struct TopFlags {
  std::string url = "http://127.0.0.1:9464/metrics";
  double interval_seconds = 1;
  bool once = false;
};

absl::StatusOr<MetricsText> Look(const TopFlags& flags, const MetricsAccess& access) {
  ASSIGN_OR_RETURN(std::string text, FetchMetrics(flags.url, absl::Seconds(5), access));
  return MetricsText::Parse(text);
}

void Show(const TopFrame& frame, const TopFlags& flags, const Session& session, TopScreen* screen) {
  if (session.json()) {
    std::cout << JsonText(frame.ToJson(), -1) << std::endl;  // one line a frame
    return;
  }
  if (screen == nullptr) {
    frame.Print(std::cout, session.color(), kFileColumns);
    std::cout << std::endl;
    return;
  }
  std::ostringstream text;
  frame.Print(text, session.color(), screen->columns());
  text << "\n" << Shortened(flags.url, screen->columns() - 20) << "   q or Esc ends";
  screen->Show(text.str());
}

// Until the next frame is due; false when the user wants no more.
bool Wait(absl::Time until, const TopFrame& last, const TopFlags& flags, const Session& session,
          TopScreen* screen) {
  if (screen == nullptr) {
    absl::SleepFor(until - absl::Now());
    return true;
  }
  while (true) {
    const TopScreen::Event event = screen->WaitUntil(until);
    if (event != TopScreen::Event::kResized) return event == TopScreen::Event::kTime;
    Show(last, flags, session, screen);
  }
}

absl::Status ShowFrames(Session& session, const TopFlags& flags, const MetricsAccess& access,
                        MetricsText before, TopScreen* screen) {
  absl::Time then = absl::Now();
  TopFrame frame = TopFrame::Between(before, before, absl::ZeroDuration());
  if (screen != nullptr) Show(frame, flags, session, screen);
  while (Wait(then + absl::Seconds(flags.interval_seconds), frame, flags, session, screen)) {
    absl::StatusOr<MetricsText> now = Look(flags, access);
    if (screen != nullptr && screen->ended_by() != 0) break;  // it interrupted the look too
    RETURN_IF_ERROR(now.status());
    const absl::Time at = absl::Now();
    frame = TopFrame::Between(before, *now, at - then);
    Show(frame, flags, session, screen);
    if (flags.once || !std::cout) return absl::OkStatus();
    before = *std::move(now);
    then = at;
  }
  if (screen != nullptr && screen->ended_by() != 0) session.Exit(128 + screen->ended_by());
  return absl::OkStatus();
}

absl::Status RunTop(Session& session, const TopFlags& flags) {
  std::signal(SIGPIPE, SIG_IGN);
  ASSIGN_OR_RETURN(const ClientOptions options, session.MakeClientOptions());
  MetricsAccess access{.ca_file = "", .token = options.bearer_token};
  if (options.tls.has_value()) access.ca_file = options.tls->ca_file;
  ASSIGN_OR_RETURN(MetricsText before, Look(flags, access));
  std::optional<TopScreen> screen;
  if (!flags.once && !session.json() && isatty(STDOUT_FILENO) != 0) screen.emplace();
  return ShowFrames(session, flags, access, std::move(before),
                    screen.has_value() ? &*screen : nullptr);
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
      "q, Esc or Ctrl-C ends it. With -o json each frame is a line. An https URL is checked with\n"
      "--tls-ca and gets the token of --token-file.\n\nExamples:\n  attnctl top\n"
      "  attnctl top --once -o json --metrics http://gpu7:9464/metrics");
  command->callback([&session, flags] {
    absl::Status status = RunTop(session, *flags);
    if (!status.ok()) session.Fail(status);
  });
}

}  // namespace attnd
