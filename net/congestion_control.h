// TCP congestion control of one socket. Where a system's default is BBR, that paces what is sent
// over loopback too, where nothing can be congested: on two cores a third of the CPU time for a
// byte, and half of the rate under load, goes into its timers (docs/PERFORMANCE.md, Wire). Any
// thread.
#pragma once

#include <string>

namespace attnd {

// Does not pace, and any user may choose it (tcp(7), tcp_allowed_congestion_control).
inline constexpr char kLoopbackCongestion[] = "reno";

// Before or after connect. False when the kernel has no such algorithm or does not allow it: then
// the socket works as before.
bool SetCongestionControl(int socket, const std::string& name);

// Whether both ends of a connected TCP socket have the same address.
bool StaysOnThisHost(int socket);

}  // namespace attnd
