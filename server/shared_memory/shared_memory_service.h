// SharedMemoryService: the control socket beside one unix socket, on which callers of this host
// hand over memory (proto/attnd/v1/shared_memory.proto). One thread serves all connections, a
// packet at a time; tensors never pass here. Whatever a peer sends or does not send costs him at
// most his own connection.
//
//   Start   binds PATH.shm; who may connect is the umask's choice, as for PATH; UNAVAILABLE when it
//           cannot
//   close   of a connection, or of the listener: its regions go as soon as no call uses them
//
// Threads: Start and the destructor by one.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "net/file_descriptor.h"
#include "net/unix_socket.h"
#include "server/security/auth.h"
#include "server/shared_memory/shared_memory.h"

namespace attnd {

// The control socket's path is the unix socket's with this behind it.
inline constexpr absl::string_view kSharedMemorySuffix = ".shm";

class SharedMemoryService {
 public:
  // A connection that has given no region for this long is closed.
  static constexpr absl::Duration kIdleTime = absl::Seconds(10);

  // `unix_path`: of the socket on which gRPC listens, or will. The others outlive the listener.
  static absl::StatusOr<std::unique_ptr<SharedMemoryService>> Start(const std::string& unix_path,
                                                                    int max_connections,
                                                                    SharedMemoryTable& table,
                                                                    const Authenticator& auth,
                                                                    Logger& log);
  ~SharedMemoryService();

  const std::string& path() const { return path_; }
  int connections() const { return connection_count_; }

 private:
  class Connection;

  SharedMemoryService(std::string path, UnixSocket socket, FileDescriptor wake, int max_connections,
                      SharedMemoryTable& table, const Authenticator& auth, Logger& log);
  void Serve();
  int PollTimeout(absl::Time now) const;
  void Accept(absl::Time now);
  void CloseIdle(absl::Time now);

  const std::string path_;
  UnixSocket socket_;
  FileDescriptor wake_;  // readable: stop
  const int max_connections_;
  SharedMemoryTable& table_;
  const Authenticator& auth_;
  Logger& log_;
  std::map<int, std::unique_ptr<Connection>> connections_;  // by descriptor; the thread's
  absl::Time accept_again_ = absl::InfinitePast();          // out of descriptors until then
  std::atomic<int> connection_count_{0};
  std::thread thread_;
};

}  // namespace attnd
