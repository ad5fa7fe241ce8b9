// Metrics: every series that the daemon exposes, with its labels' values and buckets; metric_list.h
// names and explains them. Calls of attention add to the series of this class, callers' to
// CallerMetrics, modules' to ModuleMetrics; what is read at a scrape is in SampledMetrics. Series
// of Forward and Backward exist from the start; those of rare outcomes and other methods come with
// the first one, so that an idle daemon has at most 500. Prefix attnd_. Any thread.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/call/call.h"
#include "server/metrics/caller_metrics.h"
#include "server/metrics/module_metrics.h"
#include "server/metrics/sampled_metrics.h"
#include "server/metrics/span_export.h"

namespace attnd {

enum class Method : uint8_t {
  kForward,
  kBackward,
  kGetServerInfo,
  kRenewResidual,
  kReleaseResidual,
  kCompileMask,
  kBuildPattern,
  kReleaseCapture
};
inline constexpr int kMethods = 8;
absl::string_view MethodName(Method method);
constexpr Method MethodOf(Direction direction) {
  return direction == Direction::kForward ? Method::kForward : Method::kBackward;
}

// Parts of a request's time; their sum is the request.
enum class RequestStage : uint8_t { kReceive, kQueue, kUpload, kKernel, kDownload, kSend };
inline constexpr int kRequestStages = 6;

// Where a call was when it was found late or cancelled.
enum class WorkStage : uint8_t { kReceive, kQueue, kKernel, kSend };
inline constexpr int kWorkStages = 4;
absl::string_view WorkStageName(WorkStage stage);

// How a residual lease ended.
enum class LeaseEnd : uint8_t { kReleased, kExpired, kEvicted, kReplaced, kDeviceLost };
inline constexpr int kLeaseEnds = 5;
absl::string_view LeaseEndName(LeaseEnd how);

// How the look-up of a backward's token ended.
enum class LeaseLookup : uint8_t {
  kHit,
  kExpired,
  kEvicted,
  kReleased,
  kUnknown,
  kWrongReplica,
  kForbidden,
  kMismatch,
  kDeviceLost,
  kEpochChanged
};

class Metrics {
 public:
  Metrics();

  // Returns the series that the metrics port serves.
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables() const {
    return {registry_, sampled_};
  }

  CallerMetrics& callers() { return callers_; }
  // Makes the series of the service Modules, once, where it is served. `devices`: what may compute
  // them.
  ModuleMetrics& AddModules(const std::vector<std::string>& devices) {
    return modules_.emplace(*registry_, devices);
  }

  void CallStarted(Method method);
  // `reason` is empty for OK; it chooses the series of rejected requests.
  void CallFinished(Method method, absl::StatusCode code, absl::string_view reason,
                    absl::Duration duration);
  void StageTook(Method method, RequestStage stage, absl::Duration duration);
  void CallAdmitted(const AttentionCall& call);
  // Query rows of a call, over its batch.
  static int64_t TokensOf(const AttentionCall& call);
  void CallQueued(Direction direction, Priority priority, absl::Duration waited);
  void CallStopped(WorkStage stage, bool expired);
  // A call was ended because its peer sent (kReceive, of a Forward or Backward) or read (kSend) too
  // slowly.
  // `reason` is the status' own, one that TransferProgress::Check gives.
  void CallCut(Method method, WorkStage stage, absl::string_view reason);
  void QueueChanged(int device, Direction direction, Priority priority, int calls, int64_t bytes);
  void BatchRun(Direction direction, int calls, int64_t tokens);
  void HostCopied(int64_t bytes);
  void Received(bool unix_socket, int64_t bytes);
  void Sent(bool unix_socket, int64_t bytes);
  // Counts bytes of tensors that lie in shared memory and do not travel.
  void SharedReceived(int64_t bytes);
  void SharedSent(int64_t bytes);
  void AuthFailed(absl::string_view reason);
  // `place` is a device's number or kHostMemory.
  void LeaseGranted(int place);
  void LeaseRefused();
  void LeaseEnded(int place, LeaseEnd how, absl::Duration lifetime);
  void LeaseLookedUp(LeaseLookup result);
  void UploadSaved(int64_t bytes);
  void SetReady(bool ready);
  void SetDraining();
  void SetBuildInfo(absl::string_view version, absl::string_view revision,
                    absl::string_view cpu_target);

  // MeteredBackend adds to these. Devices are added at the start, and are down until they are up;
  // the result is the device's number from then on.
  int AddDevice(const std::string& name, const BackendInfo& engine);
  void SetDeviceUp(int device, bool up);
  struct KernelSeries {
    int device;
    Direction direction;
    ElementType element;
    std::string kernel;
    int64_t head_dim;  // of the widest call, rounded up: HeadDimLabel
    friend auto operator<=>(const KernelSeries&, const KernelSeries&) = default;
  };
  // 32, 64, 96, 128 or 256: the first that is not less.
  static int64_t HeadDimLabel(int64_t head_dim);
  void KernelRan(const KernelSeries& series, double seconds, double flops);
  void KernelFailed(int device, Direction direction, const absl::Status& status);

  // Spans of calls go to this collector from now on: SpanExport::Start. Before calls come.
  absl::Status ExportSpans(const std::string& endpoint, const std::string& version);
  SpanExport* spans() const { return spans_.get(); }  // null: nobody wants them

  // For series that are read when they are scraped.
  const std::shared_ptr<SampledMetrics>& sampled() const { return sampled_; }

 private:
  using Counter = prometheus::Counter;
  using Gauge = prometheus::Gauge;
  using Histogram = prometheus::Histogram;
  using Counters = std::vector<Counter*>;  // owned, as all series, by registry_
  using Gauges = std::vector<Gauge*>;
  using Histograms = std::vector<Histogram*>;

  struct Device;
  // A family that is there already comes back.
  prometheus::Family<Counter>& CounterFamily(const char* name);
  prometheus::Family<Gauge>& GaugeFamily(const char* name);
  prometheus::Family<Histogram>& HistogramFamily(const char* name);
  void MakeRequestSeries();
  void MakeQueueSeries();
  void MakeMemorySeries();
  void MakeLeaseSeries();
  void MakeStateSeries();
  void MakeQueues(prometheus::Labels labels, Device& device);
  void MakeKernels(prometheus::Labels labels, Device& device);
  struct Leases {
    Counter* granted;
    Counters ended;  // [LeaseEnd]
  };
  Leases MakeLeases(const std::string& place);
  Leases& LeasesAt(int place);

  // Both shared with the metrics port.
  const std::shared_ptr<prometheus::Registry> registry_;
  const std::shared_ptr<SampledMetrics> sampled_;
  CallerMetrics callers_;
  std::optional<ModuleMetrics> modules_;
  std::unique_ptr<SpanExport> spans_;

  prometheus::Family<Counter>* requests_ = nullptr;
  Counters answered_;  // [method], OK; as the next two
  prometheus::Family<Histogram>* durations_ = nullptr;
  Histograms took_;                                        // [method], Forward and Backward
  Histograms refusals_;                                    // [method], Forward and Backward
  Histograms stages_;                                      // [method][stage], Forward and Backward
  Gauges in_flight_;                                       // [method]
  Histograms tokens_;                                      // [direction]
  std::map<std::string, Counter*, std::less<>> rejected_;  // by reason, fixed
  Counters cancelled_, expired_;                           // [work stage]
  prometheus::Family<Counter>* cut_ = nullptr;
  prometheus::Family<Histogram>* queue_duration_ = nullptr;
  Histograms queued_;                // [direction], normal priority
  Histograms batch_, batch_tokens_;  // [direction]
  Counters received_, sent_;         // [tcp, uds, memfd]
  Counter* copied_ = nullptr;
  std::map<std::string, Counter*, std::less<>> auth_failures_;
  Leases host_leases_;
  Counter* leases_refused_ = nullptr;
  Counters lease_lookups_;  // [LeaseLookup]
  Histogram* lease_lifetime_ = nullptr;
  Counter* upload_saved_ = nullptr;
  Gauge* ready_ = nullptr;
  Gauge* draining_ = nullptr;
  struct Device {
    std::string name;
    Counters flops;      // [direction]
    Counters failures;   // [direction]
    Gauges queue_depth;  // [direction][priority]
    Gauges queue_bytes;  // [direction]
    Leases leases;
    Gauge* up = nullptr;
  };
  struct Kernel {
    Histogram* duration = nullptr;  // of all head dimensions
    Counter* launches = nullptr;
  };
  Kernel KernelOf(const KernelSeries& series);
  std::deque<Device> devices_;
  absl::Mutex kernel_mutex_;
  // Made when a kernel first runs: which kernels there are is the engine's business.
  std::map<KernelSeries, Kernel> kernels_ ABSL_GUARDED_BY(kernel_mutex_);
};

}  // namespace attnd
