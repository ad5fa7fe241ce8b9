#include "server/app/options.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "net/listen_address.h"
#include "server/metrics/span_export.h"

namespace attnd {
namespace {

template <class Expected, class Got>
absl::Status Wrong(absl::string_view flag, const Expected& expected, const Got& got) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected ", expected, ", got ", got));
}

// Whole ones with all their digits.
std::string Number(double value) {
  bool whole = value == std::floor(value) && std::abs(value) < 1e15;
  return whole ? absl::StrCat(static_cast<int64_t>(value)) : absl::StrCat(value);
}

absl::Status InRange(absl::string_view flag, double value, double low, double high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Wrong(flag, absl::StrCat(Number(low), "..", Number(high)), Number(value));
}

// Limits and errors are in the flag's unit, as its reader writes it.
absl::Status InRangeMib(absl::string_view flag, int64_t bytes, double low, double high) {
  return InRange(flag, static_cast<double>(bytes) / double{1 << 20}, low, high);
}

absl::Status CheckTcpAddress(absl::string_view flag, absl::string_view address) {
  size_t colon = address.rfind(':');
  int port = -1;
  bool has_port = colon != absl::string_view::npos && colon > 0 &&
                  absl::SimpleAtoi(address.substr(colon + 1), &port);
  if (has_port && port >= 0 && port <= 65535) return absl::OkStatus();
  return Wrong(flag, "host:port with a port of 0..65535", absl::StrCat("\"", address, "\""));
}

absl::Status CheckAddress(absl::string_view address) {
  if (!IsUnixAddress(address)) return CheckTcpAddress("listen", address);
  size_t name = address.find(':') + 1;
  // A unix socket's path has room for 107 bytes (unix(7)).
  if (address.size() > name && address.size() - name <= 107) return absl::OkStatus();
  return Wrong("listen", "unix:PATH of at most 107 bytes", absl::StrCat("\"", address, "\""));
}

// Port 0 picks another one each time.
absl::Status CheckAddresses(const ServerOptions& o) {
  if (o.listen.empty()) return Wrong("listen", "at least one address", "none");
  std::set<std::string> seen;
  for (const std::string& address : o.listen) {
    RETURN_IF_ERROR(CheckAddress(address));
    if (!seen.insert(address).second && !absl::EndsWith(address, ":0")) {
      return Wrong("listen", "different addresses", absl::StrCat("\"", address, "\" twice"));
    }
  }
  if (o.metrics_listen.empty()) return absl::OkStatus();
  if (seen.contains(o.metrics_listen) && !absl::EndsWith(o.metrics_listen, ":0")) {
    return Wrong("metrics_listen", "another address than --listen's",
                 absl::StrCat("\"", o.metrics_listen, "\""));
  }
  return CheckTcpAddress("metrics_listen", o.metrics_listen);
}

absl::Status CheckSecurity(const ServerOptions& o) {
  if (o.tls.certificate.empty() != o.tls.key.empty()) {
    return Wrong(o.tls.key.empty() ? "tls_key" : "tls_cert", "both --tls_cert and --tls_key",
                 "only one of them");
  }
  if (!o.tls.client_ca.empty() && o.tls.certificate.empty()) {
    return Wrong("tls_client_ca", "--tls_cert and --tls_key beside it", "none");
  }
  for (const std::string& address : o.listen) {
    if (IsLoopbackAddress(address) || o.insecure) continue;
    if (o.tls.certificate.empty()) {
      return Wrong("listen",
                   "TLS (--tls_cert and --tls_key) or --insecure for an address that others reach",
                   absl::StrCat("\"", address, "\" without either"));
    }
    if (o.tls.client_ca.empty() && o.token_file.empty()) {
      return Wrong("listen",
                   "--tls_client_ca, --token_file or --insecure for an address that others reach",
                   absl::StrCat("\"", address, "\" open to every caller"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLeases(const ServerOptions& o) {
  auto seconds = [](absl::Duration d) { return absl::ToDoubleSeconds(d); };
  const double memory_mib = double(o.admission.memory_bytes) / double{1 << 20};
  RETURN_IF_ERROR(InRangeMib("lease_memory_mib", o.leases.memory_bytes, 0, memory_mib));
  RETURN_IF_ERROR(InRangeMib("mask_memory_mib", o.masks.bytes, 1, memory_mib));
  RETURN_IF_ERROR(InRange("lease_hbm_fraction", o.lease_hbm_fraction, 0, 0.95));
  return InRange("lease_ttl_seconds", seconds(o.leases.ttl), 1, seconds(o.leases.max_ttl));
}

absl::Status CheckModules(const ModuleOptions& modules) {
  const double tib = 1 << 20;  // in MiB
  RETURN_IF_ERROR(InRangeMib("module_memory_mib", modules.memory.bytes, 0, tib));
  RETURN_IF_ERROR(InRangeMib("caller_module_mib", modules.memory.caller_bytes, 0, tib));
  RETURN_IF_ERROR(InRange("module_hbm_fraction", modules.hbm_fraction, 0, 0.95));
  RETURN_IF_ERROR(InRange("module_save_seconds", absl::ToDoubleSeconds(modules.save_every), 0.001,
                          7 * 24 * 3600.0));
  RETURN_IF_ERROR(InRangeMib("module_state_mib", modules.state_bytes, 0, 1024 * tib));
  RETURN_IF_ERROR(
      InRange("module_state_days", absl::ToDoubleSeconds(modules.state_age) / 86400, 0.001, 36500));
  RETURN_IF_ERROR(
      InRange("module_shadow_every", static_cast<double>(modules.shadow_every), 0, 1 << 20));
  return InRange("max_modules", static_cast<double>(modules.max_modules), 1, 65536);
}

absl::Status CheckTransport(const TransportOptions& t) {
  const double most_seconds = 7 * 24 * 3600.0;
  auto seconds = [](absl::Duration d) { return absl::ToDoubleSeconds(d); };
  RETURN_IF_ERROR(InRangeMib("max_message_mib", t.max_message_bytes, 1, 1024));
  RETURN_IF_ERROR(InRange("max_concurrent_streams", t.max_concurrent_streams, 1, 65536));
  RETURN_IF_ERROR(InRangeMib("receive_memory_mib", t.receive_memory_bytes, 16, 1 << 20));
  RETURN_IF_ERROR(InRange("max_connections", t.max_connections, 1, 1 << 20));
  RETURN_IF_ERROR(
      InRange("max_connection_age_seconds", seconds(t.max_connection_age), 1, most_seconds));
  RETURN_IF_ERROR(
      InRange("max_connection_idle_seconds", seconds(t.max_connection_idle), 1, most_seconds));
  RETURN_IF_ERROR(InRange("keepalive_seconds", seconds(t.keepalive_time), 1, most_seconds));
  bool known = t.bdp_probe == "auto" || t.bdp_probe == "on" || t.bdp_probe == "off";
  if (!known) return Wrong("bdp_probe", "auto, on or off", t.bdp_probe);
  return InRange("stream_idle_seconds", seconds(t.transfers.idle), 0.01, 3600.0);
}

absl::Status CheckLimits(const ServerOptions& o) {
  const double tib = 1 << 20;  // in MiB
  const double most_seconds = 7 * 24 * 3600.0;
  auto seconds = [](absl::Duration d) { return absl::ToDoubleSeconds(d); };
  RETURN_IF_ERROR(InRangeMib("memory_limit_mib", o.admission.memory_bytes, 1, tib));
  RETURN_IF_ERROR(InRange("max_calls", double(o.admission.max_calls), 1, 1 << 20));
  RETURN_IF_ERROR(InRange("max_queue_seconds", o.admission.max_queue_seconds, 0, most_seconds));
  RETURN_IF_ERROR(InRange("caller_max_calls", double(o.admission.caller_max_calls), 1, 1 << 20));
  RETURN_IF_ERROR(InRangeMib("caller_memory_mib", o.admission.caller_max_bytes, 1, tib));
  RETURN_IF_ERROR(
      InRange("max_deadline_seconds", seconds(o.admission.max_deadline), 0.001, most_seconds));
  RETURN_IF_ERROR(InRange("cpu_threads", o.cpu_threads, 0, 4096));
  for (int device : o.devices) RETURN_IF_ERROR(InRange("devices", device, 0, 1023));
  RETURN_IF_ERROR(InRange("hbm_fraction", o.hbm_fraction, 0.01, 1));
  RETURN_IF_ERROR(InRange("max_launch_ms", o.max_launch_ms, 1, 10000));
  RETURN_IF_ERROR(InRangeMib("shared_memory_limit_mib", o.shared_memory.max_bytes, 1, 64 * tib));
  RETURN_IF_ERROR(InRange("slow_call_seconds", seconds(o.slow_call), 0, most_seconds));
  if (!o.otlp_endpoint.empty()) RETURN_IF_ERROR(SpanExport::CheckEndpoint(o.otlp_endpoint));
  RETURN_IF_ERROR(InRange("lend_after_seconds", seconds(o.lend.after), 0, most_seconds));
  RETURN_IF_ERROR(InRange("lend_within_seconds", seconds(o.lend.within), 0.5, 3600));
  if (o.lend.enabled && o.backend != "cuda") {
    return Wrong("lend", "the backend cuda or auto", o.backend);
  }
  RETURN_IF_ERROR(InRange("drain_delay", seconds(o.drain_delay), 0, most_seconds));
  return InRange("drain_timeout", seconds(o.drain_timeout), 0, most_seconds);
}

// The first number of a file, or `otherwise`.
int64_t NumberIn(const char* path, int64_t otherwise) {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  return file >> word && absl::SimpleAtoi(word, &value) ? value : otherwise;
}

}  // namespace

int64_t DefaultMemoryBytes() {
  int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  memory = std::min(memory, NumberIn("/sys/fs/cgroup/memory.max", memory));
  memory = std::min(memory, NumberIn("/sys/fs/cgroup/memory/memory.limit_in_bytes", memory));
  return std::clamp(memory / 4, int64_t{256} << 20, int64_t{4} << 30);
}

absl::Status CheckOptions(const ServerOptions& o) {
  RETURN_IF_ERROR(CheckAddresses(o));
  bool known =
      o.backend == "auto" || o.backend == "cpu" || o.backend == "cuda" || o.backend == "reference";
  if (!known) return Wrong("backend", "auto, cpu, cuda or reference", o.backend);
  RETURN_IF_ERROR(CheckSecurity(o));
  RETURN_IF_ERROR(CheckLimits(o));
  RETURN_IF_ERROR(CheckLeases(o));  // within CheckLimits' memory
  RETURN_IF_ERROR(CheckModules(o.modules));
  return CheckTransport(o.transport);
}

}  // namespace attnd
