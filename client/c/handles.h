// Shared by the C interface's functions: the client behind attnd_client, and Guard.
#pragma once

#include <exception>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/attention_client.h"
#include "client/c/attnd_client.h"

struct attnd_client {
  std::unique_ptr<attnd::AttentionClient> client;
};

namespace attnd {

// Runs `operation`, which gives a Status, and turns what it throws into a Status.
template <class Operation>
absl::Status Guard(Operation operation) {
  try {
    return operation();
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("client library: ", error.what()));
  }
}

}  // namespace attnd
