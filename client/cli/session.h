// Session: what every attnctl command shares: addresses, output format and exit code.
//
// Exit codes: 0 done; 1 the answer is no (a check found a deviation, the server is not serving);
// 2 wrong usage; 3 the server cannot be reached or did not answer in time; 4 a call or a file
// failed.
#pragma once

#include <memory>
#include <string>

#include "CLI/App.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/attention_client.h"

namespace attnd {

inline constexpr int kExitNo = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitUnreachable = 3;
inline constexpr int kExitFailed = 4;

class Session {
 public:
  // Adds the global flags.
  explicit Session(CLI::App& app);

  // A client of --address and the other flags.
  absl::StatusOr<std::unique_ptr<AttentionClient>> Connect();
  absl::StatusOr<ClientOptions> MakeClientOptions() const;

  bool json() const { return output_ == "json"; }
  // Colours: standard output is a terminal, not a dumb one, and NO_COLOR is empty or not set
  // (no-color.org).
  bool color() const { return color_; }
  // Progress bars: standard error is a terminal.
  bool shows_progress() const { return shows_progress_; }

  int exit_code() const { return exit_code_; }
  void Exit(int code) { exit_code_ = code; }
  // Prints the failure on standard error, with --output json as an object on one line, and chooses
  // the exit code. `asked`: the address, if it was one of several.
  void Fail(const absl::Status& status, absl::string_view asked = "");
  // The same for flags that do not fit.
  void FailUsage(const absl::Status& status);

 private:
  void PrintText(const absl::Status& status, absl::string_view asked) const;
  void PrintJson(const absl::Status& status, absl::string_view asked) const;

  std::string addresses_ = "127.0.0.1:7070";
  std::string ca_file_, certificate_file_, key_file_, server_name_, token_file_, proxy_;
  bool tls_ = false;
  double timeout_seconds_ = 30;
  int channels_ = ClientOptions().channels_per_address;
  int64_t shard_bytes_ = int64_t{8} << 20;
  std::string output_ = "table";
  bool color_, shows_progress_;
  int exit_code_ = 0;
};

}  // namespace attnd
