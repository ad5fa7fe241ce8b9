// KeepGrpc: gRPC stays as it is to the process's end. To shut it down keeps a program that ends for
// up to ten seconds: gRPC 1.51 joins a thread that waits so long for sockets once a message has not
// fitted a socket's buffer (src/core/lib/iomgr/tcp_posix.cc, run_poller). Threads: any.
#pragma once

namespace attnd {

void KeepGrpc();

}  // namespace attnd
