// Between the C interface's structures and the client library's types, and results as JSON.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "attention/problem.h"
#include "client/attention_client.h"
#include "client/c/attnd_client.h"

namespace attnd {

// The structure as this library knows it: what an older caller lacks is zero, what a newer one has
// more is left out.
template <class Structure>
Structure FullStructure(const Structure& given) {
  Structure full;
  std::memset(&full, 0, sizeof(full));
  std::memcpy(&full, &given, std::min(given.struct_size, sizeof(full)));
  return full;
}

// INVALID_ARGUMENT where the caller forgot to say the structure's size.
template <class Structure>
absl::Status CheckHasSize(absl::string_view name, const Structure& given) {
  if (given.struct_size >= sizeof(given.struct_size)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, ".struct_size: expected sizeof of the structure, got ", given.struct_size));
}

ClientOptions ToClientOptions(const attnd_client_options& options);
Problem ToProblem(const attnd_problem& problem);  // not validated: the client does that

std::string DetailJson(const absl::Status& status);
std::string ReceiptJson(const CallReceipt& receipt);
std::string ServerInfoJson(const ServerInfo& info);
std::string MaskReportJson(const MaskReport& report);

}  // namespace attnd
