// Metrics: every series that the daemon exposes, its name, unit, labels and buckets;
// docs/METRICS.md explains them. Children exist from the start (those of a kernel since its first
// launch), so the request path only adds to numbers that no other thread writes (thread_metrics.h).
// Prefix attnd_. Any thread.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/call.h"
#include "server/sampled_metrics.h"
#include "server/thread_metrics.h"

namespace attnd {

enum class Method : uint8_t {
  kForward,
  kBackward,
  kGetServerInfo,
  kRenewResidual,
  kReleaseResidual
};
inline constexpr int kMethods = 5;
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

// What became of a backward's token.
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
inline constexpr int kLeaseLookups = 10;

class Metrics {
 public:
  Metrics();

  // What the metrics port serves.
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables() const {
    return {counts_, registry_, sampled_};
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
  // A streamed call was cut because its peer did not move (kReceive, kSend). `reason` is the
  // status' own: STREAM_IDLE or STREAM_TOO_SLOW.
  void StreamCut(WorkStage stage, absl::string_view reason);
  void QueueChanged(int device, Direction direction, Priority priority, int calls, int64_t bytes);
  void BatchRun(Direction direction, int calls, int64_t tokens);
  void HostCopied(int64_t bytes);
  void Received(bool unix_socket, int64_t bytes);
  void Sent(bool unix_socket, int64_t bytes);
  // Of tensors that lie in shared memory and do not travel.
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

  // What MeteredBackend adds. Devices are added at the start, and are down until they are up; the
  // result is the device's number from then on.
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

  // For series that are read when they are scraped.
  const std::shared_ptr<SampledMetrics>& sampled() const { return sampled_; }

 private:
  using Number = ThreadMetrics::Number;
  using Numbers = std::vector<Number>;
  using Histograms = std::vector<ThreadMetrics::Histogram>;

  struct Device;
  // Gauges that are set, by few and seldom.
  prometheus::Family<prometheus::Gauge>& StateFamily(const char* name, const char* help);
  void MakeRequestSeries();
  void MakeQueueSeries();
  void MakeMemorySeries();
  void MakeLeaseSeries();
  void MakeStateSeries();
  void MakeQueues(prometheus::Labels labels, Device& device);
  void MakeKernels(prometheus::Labels labels, Device& device);
  struct Leases {
    Number granted;
    Numbers ended;  // [LeaseEnd]
  };
  Leases MakeLeases(const std::string& place);
  Leases& LeasesAt(int place);

  // All three shared with the exposer.
  const std::shared_ptr<ThreadMetrics> counts_;
  const std::shared_ptr<prometheus::Registry> registry_;
  const std::shared_ptr<SampledMetrics> sampled_;

  Numbers requests_;                                     // [method][code]
  Histograms durations_;                                 // [method]
  Histograms refusals_;                                  // [method], Forward and Backward
  Histograms stages_;                                    // [method][stage], Forward and Backward
  Numbers in_flight_;                                    // [method]
  Histograms tokens_;                                    // [direction]
  std::map<std::string, Number, std::less<>> rejected_;  // by reason, fixed
  Numbers cancelled_, expired_;                          // [work stage]
  Numbers cut_;                                          // [receive, send][reason]
  Histograms queue_duration_;                            // [direction][priority]
  Histograms batch_, batch_tokens_;                      // [direction]
  Numbers received_, sent_;                              // [tcp, uds, memfd]
  Number copied_;
  std::map<std::string, Number, std::less<>> auth_failures_;
  Leases host_leases_;
  Number leases_refused_;
  Numbers lease_lookups_;  // [LeaseLookup]
  ThreadMetrics::Histogram lease_lifetime_;
  Number upload_saved_;
  prometheus::Gauge* ready_ = nullptr;
  prometheus::Gauge* draining_ = nullptr;
  struct Device {
    std::string name;
    Numbers flops;        // [direction]
    Numbers failures;     // [direction]
    Numbers queue_depth;  // [direction][priority]
    Numbers queue_bytes;  // [direction]
    Leases leases;
    prometheus::Gauge* up = nullptr;
  };
  struct Kernel {
    ThreadMetrics::Histogram duration;  // of all head dimensions
    Number launches;
  };
  Kernel KernelOf(const KernelSeries& series);
  std::deque<Device> devices_;
  absl::Mutex kernel_mutex_;
  // Made when a kernel first runs: which kernels there are is the engine's business.
  std::map<KernelSeries, Kernel> kernels_ ABSL_GUARDED_BY(kernel_mutex_);
};

}  // namespace attnd
