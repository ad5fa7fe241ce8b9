// Tells the service manager (systemd, Type=notify) how far the process is: "READY=1",
// "WATCHDOG=1", "STOPPING=1". It sends one datagram to the unix socket that NOTIFY_SOCKET names,
// and does nothing when there is none. Any thread. Source: sd_notify(3).
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attnd {

// OK also when nobody listens (NOTIFY_SOCKET unset). Errors: INVALID_ARGUMENT for an address that
// no unix socket can have, UNAVAILABLE when the datagram cannot be sent.
absl::Status NotifyServiceManager(absl::string_view state);

// The same for a given address: a path, or "@name" in the abstract name space.
absl::Status NotifyServiceManagerAt(absl::string_view address, absl::string_view state);

// How often the service manager wants to hear "WATCHDOG=1" at least (WatchdogSec=);
// InfiniteDuration when it does not. Source: sd_watchdog_enabled(3).
absl::Duration WatchdogPeriod();

}  // namespace attnd
