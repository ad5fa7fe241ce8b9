// ReadFile: all bytes of a file, nothing when it cannot be read. Any thread.
#pragma once

#include <sys/stat.h>

#include <fstream>
#include <sstream>
#include <string>

namespace attnd {

inline std::string ReadFile(const std::string& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return bytes.str();
}

// False for pipes, folders and devices, whose reading may never end. A link is what it points to.
inline bool IsRegularFile(const std::string& path) {
  struct stat what {};
  return stat(path.c_str(), &what) == 0 && S_ISREG(what.st_mode);
}

}  // namespace attnd
