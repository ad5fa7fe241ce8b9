// Samples AttndServer's state for metrics, at each scrape.
#include <string>
#include <utility>

#include "server/app/attnd_server.h"
#include "server/app/lender.h"
#include "server/keep/keep.h"
#include "server/metrics/resident_memory.h"
#include "server/modules/modules.h"
#include "server/rpc/calls.h"
#include "server/rpc/rpc_server.h"
#include "server/security/certificate_files.h"
#include "server/shared_memory/shared_memory_service.h"

namespace attnd {

void AttndServer::SampleState() {
  SampledMetrics& sampled = *metrics_.sampled();
  for (int n = 0; n < devices_.size(); ++n) SampleDevice(n);
  devices_.Sample(sampled);
  sampled.AddGauge("attnd_busy_ratio", {}, [this] { return calls_->recent_work().busy_ratio(); });
  sampled.AddGauge("attnd_admitted_bytes", {},
                   [this] { return static_cast<double>(calls_->admission().Use().bytes); });
  sampled.AddGauge("attnd_call_bytes", {},
                   [this] { return static_cast<double>(calls_->call_bytes().held()); });
  SampleLeases(kHostMemory, "host");
  sampled.AddGauge("attnd_staging_pool_capacity_bytes", {},
                   [this] { return static_cast<double>(staging_.capacity()); });
  sampled.AddGauge("attnd_staging_pool_used_bytes", {},
                   [this] { return static_cast<double>(staging_.used()); });
  sampled.AddGauge("attnd_staging_pool_peak_used_bytes", {},
                   [this] { return static_cast<double>(staging_.peak_used()); });
  AddResidentBytes(staging_.memory(), sampled);
  SampleSharedMemory();
  SampleMasks();
  SampleCaptures();
  SampleModules();
  SampleCertificates();
  if (options_.lend.lent.has_value()) AddLendMetrics(*options_.lend.lent, true, sampled);
}

// Read at each scrape: they are replaced while the daemon runs.
void AttndServer::SampleCertificates() {
  if (certificate_watch_ == nullptr) return;
  const TlsOptions& served = certificate_watch_->copies();
  const std::pair<const char*, std::string> files[] = {{"server", served.certificate},
                                                       {"client_ca", served.client_ca}};
  for (const auto& [role, path] : files) {
    if (path.empty()) continue;
    metrics_.sampled()->AddGauge(
        "attnd_tls_certificate_expiry_timestamp_seconds", {{"role", role}}, [path = path] {
          return absl::ToDoubleSeconds(CertificateExpiry(path) - absl::UnixEpoch());
        });
  }
}

void AttndServer::SampleSharedMemory() {
  SampledMetrics& sampled = *metrics_.sampled();
  sampled.AddGauge("attnd_shared_memory_bytes", {},
                   [this] { return static_cast<double>(shared_memory_->Use().bytes); });
  sampled.AddGauge("attnd_shared_memory_regions", {},
                   [this] { return static_cast<double>(shared_memory_->Use().regions); });
  sampled.AddGauge("attnd_shared_memory_connections", {}, [this] {
    int connections = 0;
    for (const auto& listener : shared_memory_services_) connections += listener->connections();
    return connections;
  });
}

void AttndServer::SampleModules() {
  if (modules_ == nullptr) return;
  SampledMetrics& sampled = *metrics_.sampled();
  sampled.AddGauge("attnd_modules", {},
                   [this] { return static_cast<double>(modules_->table().size()); });
  sampled.AddGauge("attnd_durable_lag_steps", {},
                   [this] { return static_cast<double>(modules_->table().durable_lag()); });
  sampled.AddGauge("attnd_module_state_bytes", {}, [this] {
    return modules_->states() == nullptr ? 0 : static_cast<double>(modules_->states()->bytes());
  });
  sampled.AddCounter("attnd_module_states_swept_total", {}, [this] {
    const StateRoot* states = modules_->states();
    return states == nullptr ? 0 : static_cast<double>(states->swept());
  });
  const ModuleEngine& engine = modules_->engine();
  const auto count = [&](const char* name, SampledMetrics::Labels labels, auto field) {
    sampled.AddCounter(name, std::move(labels),
                       [&engine, field] { return static_cast<double>(engine.Searches().*field); });
  };
  count("attnd_layer_plans_total", {{"result", "kept"}}, &SearchTotals::kept_blocks);
  count("attnd_layer_plans_total", {{"result", "measured"}}, &SearchTotals::searched_blocks);
  count("attnd_layer_plan_samples_total", {}, &SearchTotals::samples);
  count("attnd_layer_plan_seconds_total", {}, &SearchTotals::seconds);
  using Bytes = ModuleTable::Bytes;
  for (const auto& [kind, bytes] : {std::pair{"weight", &Bytes::weights},
                                    {"optimizer", &Bytes::optimizers},
                                    {"activation", &Bytes::activations},
                                    {"workspace", &Bytes::workspaces},
                                    {"other", &Bytes::others}}) {
    for (int device = 0; device < devices_.size(); ++device) {
      sampled.AddGauge("attnd_module_bytes", {{"device", devices_[device].name}, {"kind", kind}},
                       [this, device, bytes = bytes] {
                         return static_cast<double>(modules_->table().UsedBytes(device).*bytes);
                       });
    }
  }
}

void AttndServer::SampleMasks() {
  SampledMetrics& sampled = *metrics_.sampled();
  sampled.AddGauge("attnd_mask_cache_bytes", {},
                   [this] { return static_cast<double>(keep_->masks().stats().bytes); });
  sampled.AddCounter("attnd_mask_cache_hits_total", {},
                     [this] { return static_cast<double>(keep_->masks().stats().hits); });
  sampled.AddCounter("attnd_mask_cache_misses_total", {},
                     [this] { return static_cast<double>(keep_->masks().stats().misses); });
  sampled.AddGauge("attnd_mask_plan_bytes", {},
                   [this] { return static_cast<double>(keep_->masks().plans().stats().bytes); });
  sampled.AddGauge("attnd_mask_calls_waiting", {},
                   [this] { return static_cast<double>(calls_->mask_workers().waiting()); });
  sampled.AddCounter("attnd_mask_compile_seconds_total", {},
                     [this] { return keep_->masks().plans().stats().compile_seconds; });
  sampled.AddCounter("attnd_masks_compiled_total", {},
                     [this] { return static_cast<double>(keep_->masks().plans().stats().misses); });
}

void AttndServer::SampleCaptures() {
  SampledMetrics& sampled = *metrics_.sampled();
  sampled.AddGauge("attnd_capture_bytes", {},
                   [this] { return static_cast<double>(keep_->maps().stats().bytes); });
  sampled.AddCounter("attnd_captures_lost_total", {},
                     [this] { return static_cast<double>(keep_->maps().stats().lost); });
}

void AttndServer::SampleLeases(int place, const std::string& name) {
  SampledMetrics& sampled = *metrics_.sampled();
  sampled.AddGauge("attnd_leases_active", {{"device", name}}, [this, place] {
    return static_cast<double>(keep_->leases().Use(place).leases);
  });
  sampled.AddGauge("attnd_lease_bytes", {{"device", name}},
                   [this, place] { return static_cast<double>(keep_->leases().Use(place).bytes); });
}

void AttndServer::SampleDevice(int number) {
  SampledMetrics& sampled = *metrics_.sampled();
  const Devices::Served& device = devices_[number];
  const SampledMetrics::Labels labels = {{"device", device.name}};
  sampled.AddGauge("attnd_queue_estimated_seconds", labels,
                   [this, number] { return calls_->QueueSeconds(number); });
  SampleLeases(number, device.name);
  if (!device.has_own_memory()) return;
  sampled.AddGauge("attnd_hbm_admitted_bytes", labels, [this, number] {
    return static_cast<double>(calls_->admission().DeviceUse(number).memory_bytes);
  });
}

}  // namespace attnd
