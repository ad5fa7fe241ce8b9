// ThreadMetrics: counters, gauges and histograms that many threads write at once. Each thread adds
// to cells of its own, by a plain load and store that no other core waits for; a scrape adds the
// cells of all threads up. A thread that ends leaves its cells, with what is in them, to the next
// that begins, so that there are as many sets as there were threads at a time.
//
// Threads: any; series are added by one at a time, beside others that write and scrape.
#pragma once

#include <prometheus/client_metric.h>
#include <prometheus/collectable.h>
#include <prometheus/histogram.h>
#include <prometheus/labels.h>
#include <prometheus/metric_family.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class ThreadMetrics final : public prometheus::Collectable {
 public:
  using Labels = prometheus::Labels;
  using Buckets = prometheus::Histogram::BucketBoundaries;

  // Handles of series; they may be copied, and outlive nothing.
  class Number {
   public:
    Number() = default;
    void Add(double by = 1) const { owner_->Add(cell_, by); }

   private:
    friend class ThreadMetrics;
    Number(ThreadMetrics& owner, int cell) : owner_(&owner), cell_(cell) {}
    ThreadMetrics* owner_ = nullptr;
    int cell_ = 0;
  };
  class Histogram {
   public:
    Histogram() = default;
    void Observe(double value) const;

   private:
    friend class ThreadMetrics;
    Histogram(ThreadMetrics& owner, int first, const Buckets& bounds)
        : owner_(&owner), first_(first), bounds_(&bounds) {}
    ThreadMetrics* owner_ = nullptr;
    int first_ = 0;  // the sum; a count for each bound follows, and one of what is above them
    const Buckets* bounds_ = nullptr;
  };

  ThreadMetrics();
  ~ThreadMetrics() override;

  // Names and help follow Prometheus' rules. A series that is there already comes back. Gauges are
  // counts of what there is, never below 0.
  Number AddCounter(const std::string& name, const char* help, const Labels& labels);
  Number AddGauge(const std::string& name, const char* help, const Labels& labels);
  Histogram AddHistogram(const std::string& name, const char* help, const Labels& labels,
                         const Buckets& bounds);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  // The cells of one thread.
  class Cells {
   public:
    static constexpr int kChunk = 1024, kChunks = 64, kMost = kChunk * kChunks;
    ~Cells();
    // By the thread itself.
    std::atomic<double>& at(int cell) {
      std::atomic<double>* chunk = chunks_[cell / kChunk].load(std::memory_order_relaxed);
      if (chunk == nullptr) chunk = MakeChunk(cell / kChunk);
      return chunk[cell % kChunk];
    }
    double Read(int cell) const;  // by any

   private:
    std::atomic<double>* MakeChunk(int chunk);
    std::atomic<std::atomic<double>*> chunks_[kChunks] = {};
  };
  class Pool;
  struct Held;        // by a thread
  struct LastUsed {   // by a thread
    uint64_t id = 0;  // of a ThreadMetrics; 0: none
    Cells* cells = nullptr;
  };
  struct Series {
    Labels labels;
    int first = 0;
    Buckets bounds;  // of a histogram
  };
  struct Family {
    const char* help = nullptr;
    prometheus::MetricType type = prometheus::MetricType::Untyped;
    std::map<Labels, Series> series;
  };

  void Add(int cell, double by) {
    std::atomic<double>& mine = Mine().at(cell);
    mine.store(mine.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  }
  Cells& Mine() { return last_used_.id == id_ ? *last_used_.cells : FindMine(); }
  Cells& FindMine();
  Series& AddSeries(const std::string& name, const char* help, prometheus::MetricType type,
                    const Labels& labels, const Buckets& bounds);
  prometheus::ClientMetric::Histogram ReadHistogram(const Series& series, double sum) const;

  static constinit thread_local LastUsed last_used_;
  const uint64_t id_;
  const std::shared_ptr<Pool> pool_;  // and the threads that have used it
  mutable absl::Mutex mutex_;
  std::map<std::string, Family> families_ ABSL_GUARDED_BY(mutex_);  // never taken from
  int cells_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd
