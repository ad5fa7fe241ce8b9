// recvmsg(2) of a program that links this, for its libraries too: payload_receiver.h. Not for a
// shared library: a linker exports a symbol that replaces another library's, whatever its version
// script says, and a program that loads it keeps its own.
#include "base/payload_receiver.h"

extern "C" ssize_t recvmsg(int socket, msghdr* message, int flags) {
  return attnd::ReceiveMessage(socket, message, flags);
}
