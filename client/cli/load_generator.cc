#include "client/cli/load_generator.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr uint64_t kSeed = 1;

// Arrivals: when each call is due. Any thread.
class Arrivals {
 public:
  Arrivals(const Load& load, absl::Time start)
      : open_(load.requests_per_second > 0),
        start_(start),
        schedule_(load.requests_per_second, load.poisson, kSeed) {}

  // A closed loop's next call is due at once.
  absl::Time Next() {
    if (!open_) return absl::Now();
    absl::MutexLock lock(&mutex_);
    return start_ + absl::Seconds(schedule_.Next());
  }

 private:
  const bool open_;
  const absl::Time start_;
  absl::Mutex mutex_;
  ArrivalSchedule schedule_ ABSL_GUARDED_BY(mutex_);
};

void Merge(Measured& total, const Measured& part) {
  total.latencies.insert(total.latencies.end(), part.latencies.begin(), part.latencies.end());
  for (const auto& [code, count] : part.errors) total.errors[code] += count;
  if (!part.latencies.empty()) total.last_receipt = part.last_receipt;
}

void Finish(Measured& measured, absl::Duration duration) {
  std::sort(measured.latencies.begin(), measured.latencies.end());
  measured.seconds = absl::ToDoubleSeconds(duration);
}

}  // namespace

double PercentileOf(const std::vector<double>& ascending, double percent) {
  if (ascending.empty()) return 0;
  double rank = std::ceil(percent / 100 * static_cast<double>(ascending.size()));
  size_t index = static_cast<size_t>(std::max(rank, 1.0)) - 1;
  return ascending[std::min(index, ascending.size() - 1)];
}

int ErrorCount(const std::map<std::string, int>& errors) {
  int count = 0;
  for (const auto& [code, of_code] : errors) count += of_code;
  return count;
}

double Measured::Percentile(double percent) const { return PercentileOf(latencies, percent); }

double Measured::RequestsPerSecond() const {
  return seconds > 0 ? static_cast<double>(latencies.size()) / seconds : 0;
}

double ArrivalSchedule::Next() {
  at_ += poisson_ ? -std::log(1 - random_.Uniform()) / rate_ : 1 / rate_;
  return at_;
}

// One thread's calls, with outputs of its own.
class LoadGenerator::Caller {
 public:
  Caller(LoadGenerator& generator, const Load& load)
      : client_(generator.client_),
        p_(generator.problem_),
        in_(generator.inputs_),
        load_(load),
        saved_o_(generator.o_),
        saved_lse_(generator.lse_),
        o_(p_.OutputElements() * ElementBytes(p_.element)),
        lse_(p_.LseElements() * int64_t{sizeof(float)}) {
    if (!load.backward) return;
    d_q_ = AlignedBytes(p_.QueryElements() * ElementBytes(p_.element));
    d_k_ = AlignedBytes(p_.KeyElements() * ElementBytes(p_.element));
    d_v_ = AlignedBytes(p_.ValueElements() * ElementBytes(p_.element));
  }

  // lse is asked for only when a backward will need it.
  absl::StatusOr<CallReceipt> Forward() {
    return client_.Forward(p_, {.q = in_.q.data(), .k = in_.k.data(), .v = in_.v.data()},
                           {.o = o_.data(), .lse = load_.backward ? lse_.as<float>() : nullptr});
  }
  absl::StatusOr<CallReceipt> Backward() {
    return client_.Backward(p_,
                            {.q = in_.q.data(),
                             .k = in_.k.data(),
                             .v = in_.v.data(),
                             .o = saved_o_.data(),
                             .lse = saved_lse_.as<float>(),
                             .d_o = in_.d_o.data()},
                            {.d_q = d_q_.data(), .d_k = d_k_.data(), .d_v = d_v_.data()});
  }

  // Calls until `end`; what ends between `begin` and `end` is measured.
  void Run(Arrivals& arrivals, absl::Time begin, absl::Time end) {
    for (absl::Time due = arrivals.Next(); due < end; due = arrivals.Next()) {
      absl::SleepFor(due - absl::Now());
      if (load_.forward) {
        Note(Forward(), due, begin, end, result_.forward);
        due = std::max(due, absl::Now());  // a backward is due when its forward has ended
      }
      if (load_.backward) Note(Backward(), due, begin, end, result_.backward);
    }
  }

  const LoadResult& result() const { return result_; }
  AlignedBytes& o() { return o_; }
  AlignedBytes& lse() { return lse_; }

 private:
  void Note(const absl::StatusOr<CallReceipt>& receipt, absl::Time due, absl::Time begin,
            absl::Time end, Measured& measured) {
    absl::Time now = absl::Now();
    if (now < begin || now >= end) return;
    if (!receipt.ok()) {
      ++measured.errors[absl::StatusCodeToString(receipt.status().code())];
      return;
    }
    measured.latencies.push_back(absl::ToDoubleSeconds(now - due));
    measured.last_receipt = *receipt;
  }

  AttentionClient& client_;
  const Problem& p_;
  const ProblemInputs& in_;
  const Load& load_;
  const AlignedBytes& saved_o_;
  const AlignedBytes& saved_lse_;
  AlignedBytes o_, lse_, d_q_, d_k_, d_v_;
  LoadResult result_;
};

LoadGenerator::LoadGenerator(AttentionClient& client, const Problem& problem)
    : client_(client), problem_(problem), inputs_(RandomInputs(problem, kSeed)) {}

absl::StatusOr<LoadResult> LoadGenerator::Run(const Load& load) {
  if (o_.size() == 0) {
    Load first{.backward = true};
    Caller caller(*this, first);
    RETURN_IF_ERROR(caller.Forward().status());
    o_ = std::move(caller.o());
    lse_ = std::move(caller.lse());
  }
  std::vector<std::unique_ptr<Caller>> callers;
  for (int n = 0; n < load.callers; ++n) callers.push_back(std::make_unique<Caller>(*this, load));
  absl::Time start = absl::Now(), begin = start + load.warmup, end = begin + load.duration;
  Arrivals arrivals(load, start);
  std::vector<std::thread> threads;
  for (auto& caller : callers) threads.emplace_back([&] { caller->Run(arrivals, begin, end); });
  for (std::thread& thread : threads) thread.join();
  LoadResult total;
  for (auto& caller : callers) {
    Merge(total.forward, caller->result().forward);
    Merge(total.backward, caller->result().backward);
  }
  Finish(total.forward, load.duration);
  Finish(total.backward, load.duration);
  return total;
}

}  // namespace attnd
