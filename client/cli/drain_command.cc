#include "client/cli/drain_command.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "net/file_descriptor.h"

namespace attnd {
namespace {

absl::Status Failed(absl::string_view what) {
  const std::string message = absl::StrCat(what, ": ", std::strerror(errno));
  if (errno == EPERM) return absl::PermissionDeniedError(message);
  return absl::UnavailableError(message);
}

// A handle of the process that listens there, as the kernel says. It names no other process, also
// after that one has ended.
absl::StatusOr<FileDescriptor> ListenerAt(const std::string& path) {
  sockaddr_un to = {};
  to.sun_family = AF_UNIX;
  if (path.size() >= sizeof(to.sun_path)) return absl::InvalidArgumentError("the path is too long");
  std::memcpy(to.sun_path, path.data(), path.size());
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) {
    return Failed(path);
  }
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return Failed(path);
  FileDescriptor process(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
  if (!process.valid()) return Failed(absl::StrCat("process ", peer.pid));
  return process;
}

bool EndsWithin(const FileDescriptor& process, absl::Duration time) {
  const absl::Time end = absl::Now() + time;
  while (true) {
    const auto left = std::max<int64_t>(absl::ToInt64Milliseconds(end - absl::Now()), 0);
    pollfd ended = {process.get(), POLLIN, 0};
    const int found = poll(&ended, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
    if (found > 0) return true;
    if (left == 0) return false;
  }
}

// A second SIGTERM would cut the drain short: one that is under way is waited for alone.
absl::Status Drain(Session& session, std::optional<double> seconds) {
  ASSIGN_OR_RETURN(const ClientOptions options, session.MakeClientOptions());
  if (options.addresses.size() != 1 || !absl::StartsWith(options.addresses[0], "unix:")) {
    return absl::InvalidArgumentError(
        "--address: expected one unix:PATH; a daemon elsewhere is drained by what started it");
  }
  const std::string path(absl::StripPrefix(options.addresses[0], "unix:"));
  ASSIGN_OR_RETURN(const FileDescriptor process, ListenerAt(path));
  ASSIGN_OR_RETURN(const auto client, session.Connect());
  const absl::StatusOr<Health> health = client->CheckHealth(0);
  const bool drains = health.ok() && *health != Health::kServing;
  if (!drains && syscall(SYS_pidfd_send_signal, process.get(), SIGTERM, nullptr, 0) != 0) {
    return Failed("SIGTERM");
  }
  std::cout << path << (drains ? "  does not serve: it drains already\n" : "  drains\n")
            << std::flush;
  if (!seconds.has_value()) return absl::OkStatus();
  if (EndsWithin(process, absl::Seconds(*seconds))) {
    std::cout << path << "  has ended\n";
    return absl::OkStatus();
  }
  std::cerr << "attnctl: " << path << " still drains after " << *seconds
            << " s; attnd_requests_in_flight and attnd_modules say what it waits for\n";
  session.Exit(kExitNo);
  return absl::OkStatus();
}

}  // namespace

void AddDrainCommand(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand(
      "drain", "Tell the daemon behind a unix socket to drain: calls finish, modules move");
  auto* seconds = command->add_option_function<double>(
      "--wait", [](double) {}, "until it has ended, so many seconds at most; exit code 1 after");
  seconds->check(CLI::Range(0.0, 86400.0));
  command->footer("Example:\n  attnctl --address unix:/run/attnd/attnd.sock drain --wait 120");
  command->callback([&session, seconds] {
    const absl::Status status =
        Drain(session, seconds->empty() ? std::nullopt : std::optional(seconds->as<double>()));
    if (absl::IsInvalidArgument(status)) return session.FailUsage(status);
    if (!status.ok()) session.Fail(status);
  });
}

}  // namespace attnd
