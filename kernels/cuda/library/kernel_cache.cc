#include "kernels/cuda/library/kernel_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

std::string DefaultDirectory() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return absl::StrCat(cache, "/attnd");
  }
  const char* home = std::getenv("HOME");
  return home == nullptr ? "" : absl::StrCat(home, "/.cache/attnd");
}

absl::Status Failed(const std::string& what, const std::string& path) {
  return absl::InternalError(absl::StrCat(what, " ", path, ": ", std::strerror(errno)));
}

bool WriteAll(int file, absl::string_view bytes) {
  while (!bytes.empty()) {
    ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

KernelCache::KernelCache(std::string directory)
    : directory_(directory.empty() ? DefaultDirectory() : std::move(directory)) {}

std::string KernelCache::PathOf(const std::string& key) const {
  return absl::StrCat(directory_, "/", key, ".cubins");
}

std::optional<std::string> KernelCache::Get(const std::string& key) const {
  if (directory_.empty()) return std::nullopt;
  std::ifstream file(PathOf(key), std::ios::binary);
  if (!file) return std::nullopt;
  std::stringstream bytes;
  bytes << file.rdbuf();
  return std::move(bytes).str();
}

absl::Status KernelCache::Put(const std::string& key, absl::string_view bytes) const {
  if (directory_.empty()) return absl::InternalError("no cache folder: HOME is not set");
  return ReplaceFile(PathOf(key), bytes);
}

absl::Status ReplaceFile(const std::string& path, absl::string_view bytes) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  std::string temporary = path + ".XXXXXX";
  int file = mkstemp(temporary.data());
  if (file < 0) return Failed("cannot create", temporary);
  bool whole = WriteAll(file, bytes) && fsync(file) == 0;
  whole = close(file) == 0 && whole;
  if (whole && rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  absl::Status status = Failed("cannot write", path);
  unlink(temporary.c_str());
  return status;
}

std::string HashText(absl::string_view text) {
  absl::uint128 hash = absl::MakeUint128(0x6c62272e07bb0142u, 0x62b821756295c58du);
  const absl::uint128 prime = absl::MakeUint128(0x0000000001000000u, 0x000000000000013bu);
  for (unsigned char c : text) hash = (hash ^ absl::uint128(c)) * prime;
  return absl::StrCat(absl::Hex(absl::Uint128High64(hash), absl::kZeroPad16),
                      absl::Hex(absl::Uint128Low64(hash), absl::kZeroPad16));
}

}  // namespace attnd
