// TlsOptions: the files of the server's certificate, by which callers know it and it knows them.
#pragma once

#include <string>

#include "absl/time/time.h"

namespace attnd {

struct TlsOptions {
  std::string certificate;  // PEM chain; empty: no TLS
  std::string key;          // PEM
  std::string client_ca;    // PEM; set: clients must show a certificate signed by it
  absl::Duration refresh = absl::Seconds(10);  // how often they and tokens are looked at; whole s
};

}  // namespace attnd
