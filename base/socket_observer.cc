#include "base/socket_observer.h"

#include <grpc/support/sync.h>
#include <grpcpp/version_info.h>

#include <utility>

static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare grpc_socket_mutator with this gRPC's src/core/lib/iomgr/socket_mutator.h");

// gRPC's own declarations, which its packages do not install.
struct grpc_mutate_socket_info {
  int fd;
  int usage;  // grpc_fd_usage: unused here
};
struct grpc_socket_mutator_vtable {
  bool (*mutate_fd)(int fd, grpc_socket_mutator* mutator);  // unused beside mutate_fd_2
  int (*compare)(grpc_socket_mutator* a, grpc_socket_mutator* b);
  void (*destroy)(grpc_socket_mutator* mutator);
  bool (*mutate_fd_2)(const grpc_mutate_socket_info* info, grpc_socket_mutator* mutator);
};
struct grpc_socket_mutator {
  const grpc_socket_mutator_vtable* vtable;
  gpr_refcount refcount;
};
void grpc_socket_mutator_init(grpc_socket_mutator* mutator,
                              const grpc_socket_mutator_vtable* vtable);

namespace attnd {
namespace {

// gRPC knows it by its base.
struct Mutator : grpc_socket_mutator {
  std::function<bool(int socket)> on_socket;
};

Mutator* From(grpc_socket_mutator* base) { return static_cast<Mutator*>(base); }

constexpr grpc_socket_mutator_vtable kVtable = {
    .mutate_fd = nullptr,
    .compare = [](grpc_socket_mutator* a, grpc_socket_mutator* b) { return a < b ? -1 : a > b; },
    .destroy = [](grpc_socket_mutator* m) { delete From(m); },
    .mutate_fd_2 = [](const grpc_mutate_socket_info* info,
                      grpc_socket_mutator* m) { return From(m)->on_socket(info->fd); },
};

}  // namespace

void ObserveSockets(std::function<bool(int socket)> on_socket, grpc::ChannelArguments& arguments) {
  auto* mutator = new Mutator;  // gRPC counts its references and calls destroy
  mutator->on_socket = std::move(on_socket);
  grpc_socket_mutator_init(mutator, &kVtable);
  arguments.SetSocketMutator(mutator);
}

}  // namespace attnd
