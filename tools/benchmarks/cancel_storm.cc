// cancel_storm: what a daemon keeps of calls whose callers went away. Calls of random lengths are
// cancelled at random points, from before they are sent to after they are answered, beside a caller
// whose answers must stay the same; then many at once, and how soon the daemon has all memory back.
//
//   cancel_storm --address 127.0.0.1:7070 --metrics http://127.0.0.1:9464/metrics
//
// Ends with 1 when an answer changed, a call ended as anything but answered or cancelled, or memory
// stayed taken. The daemon must have no other callers.
#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "net/process_tuning.h"
#include "proto/attnd/v1/attention.grpc.pb.h"
#include "tools/benchmarks/load_flags.h"

namespace attnd {
namespace {

struct Options {
  LoadFlags load{.length = 2048, .heads = 4};
  int64_t calls = 1000, in_flight = 32, burst = 50;
  uint64_t seed = 1;
};

// A call that is under way from its constructor on, and over when its destructor returns.
class Call {
 public:
  Call(v1::Attention::Stub& stub, const v1::ForwardRequest& request) {
    stub.async()->Forward(&context_, &request, &reply_, [this](grpc::Status status) {
      status_ = std::move(status);
      done_.Notify();
    });
  }
  ~Call() { done_.WaitForNotification(); }
  void Cancel() { context_.TryCancel(); }
  const grpc::Status& Wait() {
    done_.WaitForNotification();
    return status_;
  }
  const v1::ForwardResponse& reply() const { return reply_; }

 private:
  grpc::ClientContext context_;
  v1::ForwardResponse reply_;
  grpc::Status status_;
  absl::Notification done_;
};

// Reads the bytes that the daemon holds for calls.
double BytesTaken(const Options& options) {
  const MetricsText metrics = Scrape(options.load.metrics);
  double bytes = 0;
  for (const char* name : {"attnd_hbm_pool_used_bytes", "attnd_hbm_admitted_bytes",
                           "attnd_admitted_bytes", "attnd_staging_pool_used_bytes"}) {
    bytes += metrics.Sum(name);
  }
  return bytes;
}

// −1 when it is not all back within ten seconds.
double MillisecondsUntilAllIsBack(const Options& options) {
  const absl::Time begin = absl::Now();
  while (absl::Now() < begin + absl::Seconds(10)) {
    if (BytesTaken(options) == 0) return absl::ToDoubleMilliseconds(absl::Now() - begin);
  }
  return -1;
}

using Counts = std::map<grpc::StatusCode, int64_t>;

class Storm {
 public:
  explicit Storm(const Options& options)
      : options_(options),
        stub_(v1::Attention::NewStub(
            grpc::CreateChannel(options.load.address, grpc::InsecureChannelCredentials()))),
        random_(options.seed) {
    for (int64_t length = 64; length <= options.load.length; length *= 2) {
      requests_.push_back(options.load.Request(length));
    }
  }

  // Each call is cancelled up to twice the time after its start that a lone one of them takes.
  Counts Run() {
    const absl::Duration lone = TimeOfOne();
    Counts counts;
    std::deque<std::unique_ptr<Call>> calls;
    for (int64_t n = 0; n < options_.calls; ++n) {
      if (static_cast<int64_t>(calls.size()) == options_.in_flight) {
        ++counts[calls.front()->Wait().error_code()];
        calls.pop_front();
      }
      calls.push_back(std::make_unique<Call>(*stub_, AnyRequest()));
      absl::SleepFor(lone * random_.Uniform() * 2 / static_cast<double>(options_.in_flight));
      calls[static_cast<size_t>(random_.Between(0, static_cast<int64_t>(calls.size()) - 1))]
          ->Cancel();
    }
    for (auto& call : calls) ++counts[call->Wait().error_code()];
    return counts;
  }

  // Milliseconds from the last cancel until all memory is back.
  double Burst(Counts& counts) {
    std::deque<Call> calls;
    for (int64_t n = 0; n < options_.burst; ++n) calls.emplace_back(*stub_, requests_.back());
    const absl::Time begin = absl::Now();
    while (BytesTaken(options_) == 0 && absl::Now() < begin + absl::Seconds(1)) {
    }
    for (Call& call : calls) call.Cancel();
    const double took = MillisecondsUntilAllIsBack(options_);
    for (Call& call : calls) ++counts[call.Wait().error_code()];
    return took;
  }

 private:
  const v1::ForwardRequest& AnyRequest() {
    return requests_[static_cast<size_t>(
        random_.Between(0, static_cast<int64_t>(requests_.size()) - 1))];
  }
  absl::Duration TimeOfOne() {
    absl::Time begin = absl::Now();
    for (int n = 0; n < 6; ++n) {
      if (n == 1) begin = absl::Now();  // the first connects
      CHECK(Call(*stub_, requests_.back()).Wait().ok());
    }
    return (absl::Now() - begin) / 5;
  }

  const Options& options_;
  const std::unique_ptr<v1::Attention::Stub> stub_;
  std::vector<v1::ForwardRequest> requests_;  // shortest first
  Random random_;
};

// Asks for the same again and again until told to stop.
class Bystander {
 public:
  explicit Bystander(const Options& options)
      : request_(options.load.Request(300)),
        stub_(v1::Attention::NewStub(
            grpc::CreateChannel(options.load.address, grpc::InsecureChannelCredentials()))) {
    Call first(*stub_, request_);
    CHECK(first.Wait().ok()) << first.Wait().error_message();
    expected_ = first.reply().o();
    thread_ = std::thread([this] { Run(); });
  }
  ~Bystander() { Stop(); }
  void Stop() {
    if (!stop_.HasBeenNotified()) stop_.Notify();
    if (thread_.joinable()) thread_.join();
  }
  int64_t answers = 0, wrong = 0;  // after Stop

 private:
  void Run() {
    while (!stop_.HasBeenNotified()) {
      Call call(*stub_, request_);
      wrong += !call.Wait().ok() || call.reply().o() != expected_;
      ++answers;
    }
  }

  const v1::ForwardRequest request_;
  const std::unique_ptr<v1::Attention::Stub> stub_;
  std::string expected_;
  absl::Notification stop_;
  std::thread thread_;
};

// Whether all ended as they should.
bool Print(const char* what, const Counts& counts) {
  bool good = true;
  std::printf("%s:", what);
  for (const auto& [code, count] : counts) {
    std::printf(" code %d: %lld", static_cast<int>(code), static_cast<long long>(count));
    good = good && (code == grpc::StatusCode::OK || code == grpc::StatusCode::CANCELLED);
  }
  std::printf("\n");
  return good;
}

int Run(const Options& options) {
  Bystander bystander(options);
  Storm storm(options);
  bool good = Print("storm", storm.Run());
  bystander.Stop();
  std::printf("beside it: %lld answers, %lld wrong\n", static_cast<long long>(bystander.answers),
              static_cast<long long>(bystander.wrong));
  double back = MillisecondsUntilAllIsBack(options);
  std::printf("memory back after the storm: %.1f ms\n", back);
  good = good && bystander.wrong == 0 && back >= 0;
  for (int n = 0; n < 5; ++n) {
    Counts counts;
    back = storm.Burst(counts);
    good = Print("all at once", counts) && good && back >= 0;
    std::printf("memory back after the last cancel: %.1f ms\n", back);
  }
  return good ? 0 : 1;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Calls that are cancelled at random points", "cancel_storm");
  options.load.Add(app);
  app.get_option("--metrics")->required();
  app.add_option("--calls", options.calls, "of the storm");
  app.add_option("--in_flight", options.in_flight, "of them at a time");
  app.add_option("--burst", options.burst, "calls that are cancelled at once");
  app.add_option("--seed", options.seed, "of lengths and points");
  CLI11_PARSE(app, argc, argv);
  return Run(options);
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  return attnd::Main(argc, argv);
}
