// A unix socket takes 208 KiB at a time by default, so that whoever sends a tensor over it sleeps
// and wakes for each of them; with more it moves a quarter more bytes (docs/PERFORMANCE.md, Wire).
// TCP widens its buffers by itself. Any thread.
#pragma once

namespace attnd {

// Lets a unix socket hold as much sent and unread data as net.core.wmem_max allows. Any other
// socket stays as it is.
void WidenIfUnixSocket(int socket);

}  // namespace attnd
