#include "client/cpp/connection_sockets.h"

#include <fcntl.h>
#include <grpc/support/sync.h>
#include <grpcpp/version_info.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <utility>

static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare grpc_socket_mutator with this gRPC's src/core/lib/iomgr/socket_mutator.h");

// gRPC's own declarations, which its packages do not install.
struct grpc_socket_mutator_vtable {
  bool (*mutate_fd)(int fd, grpc_socket_mutator* mutator);
  int (*compare)(grpc_socket_mutator* a, grpc_socket_mutator* b);
  void (*destroy)(grpc_socket_mutator* mutator);
  bool (*mutate_fd_2)(const void* info, grpc_socket_mutator* mutator);  // unused when null
};
struct grpc_socket_mutator {
  const grpc_socket_mutator_vtable* vtable;
  gpr_refcount refcount;
};
void grpc_socket_mutator_init(grpc_socket_mutator* mutator,
                              const grpc_socket_mutator_vtable* vtable);

namespace attnd {
namespace {

// A channel has one connection; while it reconnects a second socket may stand beside it.
constexpr size_t kMostDuplicates = 2;

struct Mutator {
  grpc_socket_mutator base;  // first: gRPC knows the mutator by its address
  std::shared_ptr<ConnectionSockets> sockets;
};
static_assert(offsetof(Mutator, base) == 0);

Mutator* From(grpc_socket_mutator* base) { return reinterpret_cast<Mutator*>(base); }

constexpr grpc_socket_mutator_vtable kVtable = {
    .mutate_fd = [](int fd, grpc_socket_mutator* m) { return From(m)->sockets->OnOpen(fd); },
    .compare = [](grpc_socket_mutator* a, grpc_socket_mutator* b) { return a < b ? -1 : a > b; },
    .destroy = [](grpc_socket_mutator* m) { delete From(m); },
    .mutate_fd_2 = nullptr,
};

}  // namespace

void ConnectionSockets::Watch(std::shared_ptr<ConnectionSockets> sockets,
                              grpc::ChannelArguments& arguments) {
  auto* mutator = new Mutator;  // gRPC counts its references and calls destroy
  mutator->sockets = std::move(sockets);
  grpc_socket_mutator_init(&mutator->base, &kVtable);
  arguments.SetSocketMutator(&mutator->base);
}

ConnectionSockets::~ConnectionSockets() {
  for (int socket : duplicates_) close(socket);
}

bool ConnectionSockets::OnOpen(int socket) {
  absl::MutexLock lock(&mutex_);
  if (shut_down_) return false;
  int duplicate = fcntl(socket, F_DUPFD_CLOEXEC, 0);
  if (duplicate < 0) return true;  // out of descriptors: the connection works, unwatched
  duplicates_.push_back(duplicate);
  if (duplicates_.size() > kMostDuplicates) {
    close(duplicates_.front());
    duplicates_.pop_front();
  }
  return true;
}

void ConnectionSockets::Shutdown() {
  absl::MutexLock lock(&mutex_);
  shut_down_ = true;
  for (int socket : duplicates_) shutdown(socket, SHUT_RDWR);
}

}  // namespace attnd
