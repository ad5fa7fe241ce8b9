// overload: what a daemon does with twice the calls that it can compute. First the peak, in a
// closed loop; then an open loop of twice that rate, each call with a deadline, whatever the daemon
// answers. Calls go out as bytes made once, over several connections, without retries.
//
//   overload ADDRESS SECONDS [N HEADS DEADLINE_MS]
//
// Prints the peak, and for the open loop: goodput over peak, latency of what was accepted from when
// it was due, and latency and codes of what was refused.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "tests/wire_request.h"

namespace attnd {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kConnections = 8;
constexpr int kClosedLoopCalls = 64;  // in flight
constexpr double kPeakSeconds = 8;

double Percentile(std::vector<double>& sorted, double percent) {
  if (sorted.empty()) return 0;
  return sorted[std::min(sorted.size() - 1, static_cast<size_t>(percent / 100 * sorted.size()))];
}

struct Pending {
  grpc::ClientContext context;
  grpc::ByteBuffer reply;
  grpc::Status status;
  Clock::time_point due, sent;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
};

// Sends calls and collects what became of them; completions are taken by threads of its own.
class Sender {
 public:
  Sender(const std::string& address, const v1::ForwardRequest& request, Seconds deadline)
      : deadline_(deadline) {
    grpc::Slice slice(request.SerializeAsString());
    request_ = grpc::ByteBuffer(&slice, 1);
    for (int n = 0; n < kConnections; ++n) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
      arguments.SetMaxReceiveMessageSize(-1);
      stubs_.push_back(std::make_unique<grpc::GenericStub>(
          grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments)));
      queues_.push_back(std::make_unique<grpc::CompletionQueue>());
    }
    for (auto& queue : queues_) threads_.emplace_back([this, &queue] { Collect(*queue); });
  }
  ~Sender() {
    for (auto& queue : queues_) queue->Shutdown();
    for (std::thread& thread : threads_) thread.join();
  }

  void Send(Clock::time_point due) {
    const size_t n = next_++ % kConnections;
    auto* call = new Pending;
    call->due = due;
    call->sent = Clock::now();
    call->context.set_deadline(std::chrono::system_clock::now() +
                               std::chrono::duration_cast<std::chrono::microseconds>(deadline_));
    call->reader = stubs_[n]->PrepareUnaryCall(&call->context, "/attnd.v1.Attention/Forward",
                                               request_, queues_[n].get());
    ++in_flight_;
    call->reader->StartCall();
    call->reader->Finish(&call->reply, &call->status, call);
  }
  int in_flight() const { return in_flight_; }

  struct Outcome {
    std::vector<double> accepted;  // seconds from due, sorted
    std::vector<double> refused;   // seconds from sent, sorted
    std::map<int, int> codes;
  };
  Outcome Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    Outcome outcome = std::move(outcome_);
    outcome_ = {};
    std::sort(outcome.accepted.begin(), outcome.accepted.end());
    std::sort(outcome.refused.begin(), outcome.refused.end());
    return outcome;
  }

 private:
  void Collect(grpc::CompletionQueue& queue) {
    void* tag = nullptr;
    for (bool ok = false; queue.Next(&tag, &ok);) {
      std::unique_ptr<Pending> call(static_cast<Pending*>(tag));
      const Clock::time_point now = Clock::now();
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++outcome_.codes[call->status.error_code()];
        if (call->status.ok()) {
          outcome_.accepted.push_back(Seconds(now - call->due).count());
        } else {
          outcome_.refused.push_back(Seconds(now - call->sent).count());
        }
      }
      --in_flight_;
    }
  }

  const Seconds deadline_;
  grpc::ByteBuffer request_;
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  std::vector<std::unique_ptr<grpc::CompletionQueue>> queues_;
  std::atomic<size_t> next_{0};
  std::atomic<int> in_flight_{0};
  std::mutex mutex_;
  Outcome outcome_;  // under mutex_
  std::vector<std::thread> threads_;
};

double MeasurePeak(Sender& sender, double seconds) {
  const Clock::time_point begin = Clock::now();
  while (Seconds(Clock::now() - begin).count() < seconds) {
    if (sender.in_flight() < kClosedLoopCalls) {
      sender.Send(Clock::now());
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  const double took = Seconds(Clock::now() - begin).count();
  return static_cast<double>(sender.Take().accepted.size()) / took;
}

void OpenLoop(Sender& sender, double rate, double seconds) {
  const Clock::time_point begin = Clock::now();
  const auto calls = static_cast<int64_t>(rate * seconds);
  for (int64_t n = 0; n < calls; ++n) {
    const auto due =
        begin + std::chrono::duration_cast<Clock::duration>(Seconds(static_cast<double>(n) / rate));
    std::this_thread::sleep_until(due);
    sender.Send(due);
  }
  while (sender.in_flight() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

int Main(int argc, char** argv) {
  CHECK(argc >= 3) << "overload ADDRESS SECONDS [N HEADS DEADLINE_MS]";
  const double seconds = std::atof(argv[2]);
  const int64_t length = argc > 3 ? std::atoi(argv[3]) : 1024;
  const int64_t heads = argc > 4 ? std::atoi(argv[4]) : 8;
  const double deadline = argc > 5 ? std::atof(argv[5]) / 1e3 : 1.0;
  Problem problem = SmallProblem(length, heads);
  problem.qk_head_dim = problem.v_head_dim = 64;
  problem.element = ElementType::kFloat16;
  Sender sender(argv[1], MakeForward(problem, 1), Seconds(deadline));
  MeasurePeak(sender, 2);  // connections, and the daemon's estimate
  const double peak = MeasurePeak(sender, kPeakSeconds);
  std::printf("peak, %d calls in flight: %.0f calls/s (N %d, %d heads, D 64, float16)\n",
              kClosedLoopCalls, peak, static_cast<int>(length), static_cast<int>(heads));
  while (sender.in_flight() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  sender.Take();
  OpenLoop(sender, 2 * peak, seconds);
  Sender::Outcome outcome = sender.Take();
  const double goodput = static_cast<double>(outcome.accepted.size()) / seconds;
  std::printf("twice that for %.0f s: goodput %.0f calls/s, %.1f %% of the peak\n", seconds,
              goodput, 100 * goodput / peak);
  std::printf("accepted: p50 %.1f ms, p99 %.1f ms, worst %.1f ms; deadline %.0f ms\n",
              1e3 * Percentile(outcome.accepted, 50), 1e3 * Percentile(outcome.accepted, 99),
              1e3 * Percentile(outcome.accepted, 100), 1e3 * deadline);
  std::printf("not computed: p50 %.2f ms, p99 %.2f ms, worst %.2f ms; by code:",
              1e3 * Percentile(outcome.refused, 50), 1e3 * Percentile(outcome.refused, 99),
              1e3 * Percentile(outcome.refused, 100));
  for (const auto& [code, count] : outcome.codes) std::printf(" %d: %d", code, count);
  std::printf("\n");
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
