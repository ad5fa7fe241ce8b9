// What AttndServer knows and metrics ask for at each scrape.
#include <string>
#include <utility>

#include "server/attnd_server.h"
#include "server/certificate_files.h"

namespace attnd {
namespace {

double Fragmentation(const DeviceUse& use) {
  if (use.memory_free_bytes <= 0) return 0;
  return 1 - static_cast<double>(use.memory_largest_free_bytes) /
                 static_cast<double>(use.memory_free_bytes);
}

}  // namespace

void AttndServer::SampleState() {
  SampledMetrics& sampled = *metrics_.sampled();
  for (int n = 0; n < static_cast<int>(devices_.size()); ++n) SampleDevice(n, devices_[n]);
  sampled.AddGauge("attnd_admitted_bytes",
                   "Staging memory promised to requests, from admission until their reply is sent.",
                   {}, [this] { return static_cast<double>(admission_->Use().bytes); });
  SampleLeases(kHostMemory, "host");
  sampled.AddGauge("attnd_staging_pool_capacity_bytes", "Size of the staging memory.", {},
                   [this] { return static_cast<double>(staging_.capacity()); });
  sampled.AddGauge("attnd_staging_pool_used_bytes", "Staging memory that tensors lie in.", {},
                   [this] { return static_cast<double>(staging_.used()); });
  sampled.AddGauge("attnd_staging_pool_peak_used_bytes",
                   "Most staging memory in use at once since the start.", {},
                   [this] { return static_cast<double>(staging_.peak_used()); });
  SampleSharedMemory();
  SampleCertificates();
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
        "attnd_tls_certificate_expiry_timestamp_seconds", "When the certificate ends.",
        {{"role", role}}, [path = path] {
          return absl::ToDoubleSeconds(CertificateExpiry(path) - absl::UnixEpoch());
        });
  }
}

void AttndServer::SampleSharedMemory() {
  SampledMetrics& sampled = *metrics_.sampled();
  sampled.AddGauge("attnd_shared_memory_bytes", "Memory that callers of this host share.", {},
                   [this] { return static_cast<double>(shared_memory_->Use().bytes); });
  sampled.AddGauge("attnd_shared_memory_regions", "Pieces of that memory.", {},
                   [this] { return static_cast<double>(shared_memory_->Use().regions); });
  sampled.AddGauge("attnd_shared_memory_connections", "Callers that share memory.", {}, [this] {
    int connections = 0;
    for (const auto& listener : shared_memory_services_) connections += listener->connections();
    return connections;
  });
}

void AttndServer::SampleLeases(int place, const std::string& name) {
  SampledMetrics& sampled = *metrics_.sampled();
  sampled.AddGauge("attnd_leases_active", "Residuals kept now.", {{"gpu", name}},
                   [this, place] { return static_cast<double>(leases_->Use(place).leases); });
  sampled.AddGauge("attnd_lease_bytes", "Memory of the residuals kept now.", {{"gpu", name}},
                   [this, place] { return static_cast<double>(leases_->Use(place).bytes); });
}

void AttndServer::SampleDevice(int number, const Device& device) {
  SampledMetrics& sampled = *metrics_.sampled();
  const SampledMetrics::Labels labels = {{"gpu", device.name}};
  sampled.AddGauge("attnd_queue_estimated_seconds",
                   "Estimated work of all admitted requests that are not computed yet.", labels,
                   [this, number] { return admission_->QueueSeconds(number); });
  SampleLeases(number, device.name);
  if (device.engine->Use().memory_total_bytes == 0) return;
  SampleDeviceMemory(number, device);
  SampleStreams(device);
}

// What the device itself tells, for engines that have memory of their own.
void AttndServer::SampleDeviceMemory(int number, const Device& device) {
  SampledMetrics& sampled = *metrics_.sampled();
  const SampledMetrics::Labels labels = {{"gpu", device.name}};
  const Backend& engine = *device.engine;
  auto gauge = [&](const char* name, const char* help, auto field) {
    sampled.AddGauge(name, help, labels,
                     [&engine, field] { return static_cast<double>(engine.Use().*field); });
  };
  gauge("attnd_hbm_device_total_bytes", "Memory of the GPU.", &DeviceUse::memory_total_bytes);
  gauge("attnd_hbm_device_used_bytes", "GPU memory in use by anybody, as the driver says.",
        &DeviceUse::memory_used_bytes);
  gauge("attnd_hbm_pool_reserved_bytes", "GPU memory held from the driver, in use or not.",
        &DeviceUse::memory_reserved_bytes);
  gauge("attnd_hbm_pool_largest_free_block_bytes", "Largest piece of the pool's free GPU memory.",
        &DeviceUse::memory_largest_free_bytes);
  sampled.AddGauge("attnd_hbm_pool_fragmentation_ratio",
                   "Share of the pool's free GPU memory that lies outside its largest piece.",
                   labels, [&engine] { return Fragmentation(engine.Use()); });
  gauge("attnd_hbm_pool_peak_used_bytes", "Most GPU memory in use at once since the start.",
        &DeviceUse::memory_peak_bytes);
  sampled.AddGauge(
      "attnd_hbm_admitted_bytes", "GPU memory promised to requests.", labels,
      [this, number] { return static_cast<double>(admission_->DeviceUse(number).memory_bytes); });
  auto part = [&](const char* purpose, int64_t DeviceUse::*field) {
    SampledMetrics::Labels with = labels;
    with["purpose"] = purpose;
    sampled.AddGauge("attnd_hbm_pool_used_bytes", "GPU memory in use, by what it is for.", with,
                     [&engine, field] { return static_cast<double>(engine.Use().*field); });
  };
  part("input", &DeviceUse::input_bytes);
  part("output", &DeviceUse::output_bytes);
  part("workspace", &DeviceUse::workspace_bytes);
  part("lease", &DeviceUse::lease_bytes);
}

void AttndServer::SampleStreams(const Device& device) {
  SampledMetrics& sampled = *metrics_.sampled();
  const SampledMetrics::Labels labels = {{"gpu", device.name}};
  const Backend& engine = *device.engine;
  auto counter = [&](const char* name, const char* help, auto field) {
    sampled.AddCounter(name, help, labels,
                       [&engine, field] { return static_cast<double>(engine.Use().*field); });
  };
  counter("attnd_hbm_pool_allocations_total",
          "Pieces of GPU memory taken, one for a launch or a residual.", &DeviceUse::allocations);
  counter("attnd_hbm_pool_allocation_failures_total",
          "Launches that waited for GPU memory, and residuals for which there was none.",
          &DeviceUse::allocation_failures);
  counter("attnd_h2d_bytes_total", "Bytes brought to the GPU.", &DeviceUse::uploaded_bytes);
  counter("attnd_d2h_bytes_total", "Bytes brought back from the GPU.",
          &DeviceUse::downloaded_bytes);
  auto busy = [&](const char* role, double DeviceUse::*field) {
    SampledMetrics::Labels with = labels;
    with["role"] = role;
    sampled.AddCounter("attnd_stream_busy_seconds_total",
                       "Time in which the GPU copied or computed; overlap is their sum over time.",
                       with, [&engine, field] { return engine.Use().*field; });
  };
  busy("h2d", &DeviceUse::upload_seconds);
  busy("compute", &DeviceUse::kernel_seconds);
  busy("d2h", &DeviceUse::download_seconds);
}

}  // namespace attnd
