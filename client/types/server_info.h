// ServerInfo and Health: what one daemon tells about itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace attnd {

struct DeviceInfo {
  std::string name, uuid, backend, architecture;
  int64_t memory_bytes = 0;
  bool serving = false;
  int threads = 0;
};

struct ServerInfo {
  std::string address;
  std::string version, boot_epoch;
  int64_t max_message_bytes = 0;
  std::vector<std::string> features;
  std::vector<DeviceInfo> devices;
};

enum class Health { kServing, kNotServing };

}  // namespace attnd
