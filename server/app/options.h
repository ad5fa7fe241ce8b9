// ServerOptions: everything that can be set on attnd, with its default. ParseFlags fills it from
// the command line (docs/FLAGS.md); tests set the rest. CheckOptions says what is wrong with it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "modules/segments/scheme.h"
#include "server/admission/admission.h"
#include "server/keep/lease_table.h"
#include "server/keep/map_table.h"
#include "server/keep/mask_table.h"
#include "server/modules/module_table.h"
#include "server/rpc/transport_options.h"
#include "server/schedule/device_worker.h"
#include "server/security/tls_options.h"
#include "server/shared_memory/shared_memory.h"

namespace attnd {

// Idle GPUs are lent: a process that touches none starts the daemon as its child (lender.h).
struct LendOptions {
  bool enabled = false;
  absl::Duration after = absl::Seconds(60);    // of idleness
  absl::Duration within = absl::Seconds(1.5);  // memory is given back
  // In the child alone: what its parent has counted.
  struct Loans {
    int64_t drained = 0, killed = 0;  // how daemons ended when GPUs were given back
  };
  std::optional<Loans> lent;
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
  Fusion fusion = Fusion::kBound;                  // of layers on GPUs
  std::string nccl_library;  // NCCL, which connects GPUs of several daemons; empty: none does
  std::string kernel_cache;  // folder of kernels compiled at run time; empty: the user's cache

  TlsOptions tls;
  bool insecure = false;  // allow other than loopback without TLS
  std::string token_file;

  AdmissionLimits admission;
  LeaseLimits leases;
  MaskTableLimits masks;
  MapTableLimits captures;
  std::shared_ptr<MaskPlans> mask_plans;  // the engines' too; null: the server's own
  // A call of a few microseconds that finds its device idle is computed where it was received:
  // waking another thread takes 20 to 50 us.
  DeviceWorkerOptions worker = {.inline_time = absl::Microseconds(200)};
  TransportOptions transport;
  ModuleOptions modules;  // of no memory: the service answers UNIMPLEMENTED
  SharedMemoryLimits shared_memory;
  absl::Duration drain_delay = absl::Seconds(5);
  absl::Duration drain_timeout = absl::Seconds(60);
  LendOptions lend;
  bool stop_at_eof = false;  // drain, without a delay, when standard input ends

  LogFormat log_format = LogFormat::kText;
  Severity log_level = Severity::kInfo;
  absl::Duration slow_call = absl::Seconds(10);  // calls that take longer get a line

  std::string otlp_endpoint;  // of a collector of spans; empty: none

  std::string version = "unknown";   // of the release
  std::string revision = "unknown";  // the commit
};

// OK, or InvalidArgument "flag: expected ..., got ...". Reads no file and opens no socket.
absl::Status CheckOptions(const ServerOptions& options);

// A quarter of the memory that this process may use (cgroup limit or physical memory), between
// 256 MiB and 4 GiB: the default of the memory limit.
int64_t DefaultMemoryBytes();

}  // namespace attnd
