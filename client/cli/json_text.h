// JSON as the commands print it: by lines of `indent` spaces (-1: one line). File names and
// addresses may hold any bytes; those that are not UTF-8 become U+FFFD.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace attnd {

inline std::string JsonText(const nlohmann::ordered_json& json, int indent = 2) {
  return json.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace attnd
