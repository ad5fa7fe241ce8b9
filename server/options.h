// ServerOptions: everything that can be set on attnd, with its default. ParseFlags fills it from
// the command line (docs/FLAGS.md); tests set the rest. CheckOptions says what is wrong with it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "server/admission.h"
#include "server/device_worker.h"
#include "server/lease_table.h"
#include "server/shared_memory.h"
#include "server/stream_watch.h"

namespace attnd {

struct TlsOptions {
  std::string certificate;  // PEM chain; empty: no TLS
  std::string key;          // PEM
  std::string client_ca;    // PEM; set: clients must show a certificate signed by it
  absl::Duration refresh = absl::Seconds(10);  // how often they and tokens are looked at; whole s
};

// What gRPC itself enforces, and its settings for bulk. What each is worth: docs/PERFORMANCE.md.
struct TransportOptions {
  int64_t max_message_bytes = int64_t{16} << 20;    // request or reply, header included
  int64_t max_metadata_bytes = 16 << 10;            // headers of one call
  int max_concurrent_streams = 64;                  // calls of one connection at a time
  int64_t receive_memory_bytes = int64_t{1} << 30;  // gRPC's resource quota
  int max_connections = 4096;                       // open at a time; a further one is closed
  double max_wasted_frames = 2000;  // a second, of a TCP connection: base/wasted_work.h; 0: any
  absl::Duration max_connection_age = absl::Minutes(30);
  absl::Duration max_connection_age_grace = absl::Minutes(20);
  absl::Duration max_connection_idle = absl::Minutes(10);  // without a call
  absl::Duration handshake_timeout = absl::Seconds(10);
  absl::Duration keepalive_time = absl::Minutes(2);
  absl::Duration keepalive_timeout = absl::Seconds(20);
  absl::Duration min_ping_interval = absl::Seconds(10);  // of a peer; more often: disconnected
  // on: gRPC probes each connection for its bandwidth-delay product and sets the windows by it, at
  // least 4 MiB; auto: where ServesOtherHosts; off.
  std::string bdp_probe = "auto";
  int64_t stream_window_bytes = int64_t{4} << 20;  // of one call, that a peer may send unread
  int64_t max_frame_bytes = int64_t{4} << 20;      // of HTTP/2, that a peer may send in one piece
  StreamLimits streams;
};

struct ServerOptions {
  std::vector<std::string> listen = {"127.0.0.1:7070"};
  std::string port_file;
  std::string metrics_listen = "127.0.0.1:9464";  // empty: no metrics port
  std::string metrics_port_file;
  std::string backend = "auto";
  int cpu_threads = 0;              // 0: as many as the process may use
  std::vector<int> devices;         // ordinals of the GPUs of the cuda engine; empty: all
  double hbm_fraction = 0.9;        // of each GPU's free memory, taken at the start
  double lease_hbm_fraction = 0.5;  // of that, for residuals
  double max_launch_ms = 50;        // that one kernel may keep a GPU
  std::string nvml_library = "libnvidia-ml.so.1";  // where errors of GPUs are heard
  std::string kernel_cache;  // folder of kernels compiled at run time; empty: the user's cache

  TlsOptions tls;
  bool insecure = false;  // allow other than loopback without TLS
  std::string token_file;

  AdmissionLimits admission;
  LeaseLimits leases;
  // A call of a few microseconds that finds its device idle is computed where it was received:
  // waking another thread takes 20 to 50 us.
  DeviceWorkerOptions worker = {.inline_time = absl::Microseconds(200)};
  TransportOptions transport;
  SharedMemoryLimits shared_memory;
  absl::Duration drain_delay = absl::Seconds(5);
  absl::Duration drain_timeout = absl::Seconds(60);

  LogFormat log_format = LogFormat::kText;
  Severity log_level = Severity::kInfo;
  absl::Duration slow_call = absl::Seconds(10);  // calls that take longer get a line

  std::string version = "unknown";   // of the release
  std::string revision = "unknown";  // the commit
};

// OK, or InvalidArgument "flag: expected ..., got ...". Reads no file and opens no socket.
absl::Status CheckOptions(const ServerOptions& options);

// "unix:/path" and "unix-abstract:name" are sockets of this machine.
bool IsUnixAddress(absl::string_view address);
// The file of "unix:PATH" or "unix:///PATH"; empty for other addresses.
std::string UnixPath(absl::string_view address);
// Unix sockets, 127.0.0.0/8, ::1 and localhost.
bool IsLoopbackAddress(absl::string_view address);
// Whether it listens on an address that is not this host's alone.
bool ServesOtherHosts(const ServerOptions& options);
bool ProbesBandwidth(const ServerOptions& options);

// A quarter of the memory that this process may use (cgroup limit or physical memory), between
// 256 MiB and 4 GiB: the default of the memory limit.
int64_t DefaultMemoryBytes();

}  // namespace attnd
