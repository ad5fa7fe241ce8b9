// GrpcLog: while one lives, what gRPC itself writes (failed handshakes, sockets that cannot be had)
// goes to our log as event=grpc, in its format, at most some lines a second: otherwise strangers
// could fill the disk with lines that no JSON reader understands. GRPC_VERBOSITY decides what gRPC
// writes. One at a time; gRPC's threads call it.
#pragma once

#include "base/log.h"

namespace attnd {

class GrpcLog {
 public:
  // `log` outlives it.
  explicit GrpcLog(Logger& log);
  ~GrpcLog();
  GrpcLog(const GrpcLog&) = delete;
  GrpcLog& operator=(const GrpcLog&) = delete;
};

}  // namespace attnd
