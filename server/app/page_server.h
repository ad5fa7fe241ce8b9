// PageServer: an HTTP/1 port that answers GET and HEAD with a page each and closes the connection.
// One thread serves all connections and waits for none of them, so that any number of silent ones
// costs a scrape nothing. A connection has kRequestTime to ask and kReplyTime to read; beyond
// kMostConnections the oldest that has not asked, or has its answer, makes room for a new one.
// Threads: Open and destruction by one thread; `answer` is called from the server's own.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "net/file_descriptor.h"
#include "net/listener.h"

namespace attnd {

struct Page {
  const char* status = "200 OK";
  const char* type = "text/plain";
  std::string body;
};

class PageServer {
 public:
  using Answer = std::function<Page(absl::string_view path)>;
  static constexpr size_t kMostConnections = 512;

  // `address` is "host:port", port 0 for any that is free. UNAVAILABLE when it cannot be listened
  // on.
  static absl::StatusOr<std::unique_ptr<PageServer>> Open(const std::string& address,
                                                          Answer answer);
  ~PageServer();
  int port() const { return listener_->port(); }

 private:
  using Instant = std::chrono::steady_clock::time_point;
  struct Connection {
    FileDescriptor socket;
    Instant until;
    std::string request, reply;
    size_t sent = 0;  // of the reply, which is empty until the request is whole
    bool is_answered = false;
  };
  PageServer(std::unique_ptr<Listener> listener, Answer answer);
  void Main();
  void TakeNewOnes();
  void MakeRoom();
  // False: the connection is over.
  bool Go(Connection& connection);
  bool ReadRequest(Connection& connection);
  static bool DropRest(const Connection& connection);
  std::string ReplyTo(absl::string_view request) const;

  const std::unique_ptr<Listener> listener_;
  const Answer answer_;
  const FileDescriptor wake_;          // eventfd: a new connection, or the end
  std::list<Connection> connections_;  // the thread's, oldest first
  absl::Mutex mutex_;
  std::vector<FileDescriptor> new_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attnd
