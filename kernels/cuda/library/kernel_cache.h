// KernelCache: kernels compiled at run time, kept on disk, one KernelArchive a file, named by a
// hash of everything that decides the machine code (source, headers, options, target, compiler).
// Several daemons may share a folder: a file appears whole, by renaming, or not at all, and one
// that cannot be read counts as absent. Without a usable folder nothing is kept. Any thread.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attnd {

class KernelCache {
 public:
  // `directory` is made on the first Put. Empty: $XDG_CACHE_HOME/attnd or ~/.cache/attnd.
  explicit KernelCache(std::string directory);

  std::optional<std::string> Get(const std::string& key) const;
  // INTERNAL when the file cannot be written; nothing half-written stays under the key.
  absl::Status Put(const std::string& key, absl::string_view bytes) const;

  const std::string& directory() const { return directory_; }

 private:
  std::string PathOf(const std::string& key) const;
  const std::string directory_;
};

// Makes the file and its folder. It appears whole, by renaming. INTERNAL: as it was.
absl::Status ReplaceFile(const std::string& path, absl::string_view bytes);

// 128 bits of FNV-1a over the text in hexadecimal: for names, not against malice.
std::string HashText(absl::string_view text);

}  // namespace attnd
