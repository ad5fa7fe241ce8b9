// ObserveSockets: tells of each socket that gRPC opens, accepts or listens on for a channel or a
// server, before gRPC uses it. The socket is gRPC's: it may be looked at and shut down, not closed.
//
// gRPC calls this a "socket mutator". Its type is opaque in the installed headers; the layout here
// is gRPC 1.51's (src/core/lib/iomgr/socket_mutator.h).
//
// Threads: `on_socket` is called from gRPC's, several at once.
#pragma once

#include <grpcpp/support/channel_arguments.h>

#include <functional>

namespace attnd {

// False from `on_socket`: the socket is not used. For an accepted socket it must be true: after
// false gRPC 1.51 would accept nothing on that port any more.
void ObserveSockets(std::function<bool(int socket)> on_socket, grpc::ChannelArguments& arguments);

}  // namespace attnd
