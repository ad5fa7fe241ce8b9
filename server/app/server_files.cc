#include "server/app/server_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "net/listen_address.h"
#include "server/modules/state_root.h"
#include "server/security/auth.h"
#include "server/security/certificate_files.h"

namespace attnd {
namespace {

// Whether this process can make files in the folder of `path`.
absl::Status CheckFolder(absl::string_view flag, const std::string& path) {
  std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  std::error_code none;
  if (std::filesystem::is_directory(folder, none) && access(folder.c_str(), W_OK | X_OK) == 0) {
    return absl::OkStatus();
  }
  return WrongFile(flag, "a path in a folder that this user can write to", path);
}

absl::Status CheckUnixSocket(const std::string& path) {
  RETURN_IF_ERROR(CheckFolder("listen", path));
  struct stat what;  // a dead daemon's socket is taken over
  if (lstat(path.c_str(), &what) != 0 || S_ISSOCK(what.st_mode)) return absl::OkStatus();
  return WrongFile("listen", "a path for a socket", absl::StrCat("a file, ", path));
}

// A plain file is put in an older one's place; another one is written to where it is.
absl::Status CheckPortFile(absl::string_view flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  struct stat what;
  if (lstat(path.c_str(), &what) != 0 || S_ISREG(what.st_mode)) return CheckFolder(flag, path);
  bool fits = !S_ISDIR(what.st_mode) && access(path.c_str(), W_OK) == 0;
  return fits ? absl::OkStatus() : WrongFile(flag, "a file that this user can write to", path);
}

bool StaysInPlace(const std::string& path) {
  struct stat what;
  return lstat(path.c_str(), &what) == 0 && !S_ISREG(what.st_mode);
}

}  // namespace

absl::Status CheckFiles(const ServerOptions& options) {
  for (const std::string& address : options.listen) {
    const std::string path = UnixPath(address);
    if (!path.empty()) RETURN_IF_ERROR(CheckUnixSocket(path));
  }
  RETURN_IF_ERROR(CheckPortFile("port_file", options.port_file));
  RETURN_IF_ERROR(CheckPortFile("metrics_port_file", options.metrics_port_file));
  RETURN_IF_ERROR(CheckTlsFiles(options.tls));
  RETURN_IF_ERROR(CheckCertificateTimes(options.tls, absl::Now()));
  if (!options.modules.state_dir.empty()) {
    RETURN_IF_ERROR(StateRoot::Open(options.modules.state_dir, {}).status());
  }
  if (options.token_file.empty()) return absl::OkStatus();
  return Authenticator::FromTokenFile(options.token_file).status();
}

absl::Status WritePorts(const std::string& path, const std::string& text) {
  const bool in_place = StaysInPlace(path);
  const std::string written = in_place ? path : absl::StrCat(path, ".tmp");
  RETURN_IF_ERROR(WriteWholeFile(written, text));
  if (in_place || std::rename(written.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
}

void RemovePortFiles(const ServerOptions& options) {
  for (const std::string& path : {options.port_file, options.metrics_port_file}) {
    if (!path.empty() && !StaysInPlace(path)) std::remove(path.c_str());
  }
}

}  // namespace attnd
