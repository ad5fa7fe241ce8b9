#include "base/whole_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

using File = std::unique_ptr<std::FILE, decltype(&std::fclose)>;

absl::Status Failed(absl::string_view option, absl::string_view what, const std::string& path) {
  const std::string why = std::strerror(errno);
  return absl::NotFoundError(
      absl::StrCat(option, option.empty() ? "" : ": ", what, " ", path, ": ", why));
}

}  // namespace

absl::StatusOr<std::string> ReadWholeFile(const std::string& path, absl::string_view option) {
  const File file(std::fopen(path.c_str(), "rbe"), &std::fclose);
  if (file == nullptr) return Failed(option, "cannot read", path);
  std::string bytes;
  char part[64 << 10];
  while (const size_t count = std::fread(part, 1, sizeof(part), file.get())) {
    bytes.append(part, count);
  }
  if (std::ferror(file.get()) != 0) return Failed(option, "cannot read", path);  // a folder, say
  return bytes;
}

absl::Status WriteWholeFile(const std::string& path, absl::string_view bytes,
                            absl::string_view option) {
  File file(std::fopen(path.c_str(), "wbe"), &std::fclose);
  if (file == nullptr || std::fwrite(bytes.data(), 1, bytes.size(), file.get()) != bytes.size() ||
      std::fclose(file.release()) != 0) {
    return Failed(option, "cannot write", path);
  }
  return absl::OkStatus();
}

}  // namespace attnd
