// ReadFile: all bytes of a file, nothing when it cannot be read. Any thread.
#pragma once

#include <fstream>
#include <sstream>
#include <string>

namespace attnd {

inline std::string ReadFile(const std::string& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return bytes.str();
}

}  // namespace attnd
