// The client behind attnd_client.
#pragma once

#include <memory>

#include "client/attention_client.h"
#include "client/c/attnd_client.h"

struct attnd_client {
  std::unique_ptr<attnd::AttentionClient> client;
};
