#include "server/thread_metrics.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace attnd {

using prometheus::MetricType;

constinit thread_local ThreadMetrics::LastUsed ThreadMetrics::last_used_;

ThreadMetrics::Cells::~Cells() {
  for (auto& chunk : chunks_) delete[] chunk.load();
}

std::atomic<double>* ThreadMetrics::Cells::MakeChunk(int chunk) {
  auto* made = new std::atomic<double>[kChunk]();
  chunks_[chunk].store(made, std::memory_order_release);
  return made;
}

double ThreadMetrics::Cells::Read(int cell) const {
  const std::atomic<double>* chunk = chunks_[cell / kChunk].load(std::memory_order_acquire);
  return chunk == nullptr ? 0 : chunk[cell % kChunk].load(std::memory_order_relaxed);
}

// All sets of cells, and those that no thread has.
class ThreadMetrics::Pool {
 public:
  Cells* Take() {
    absl::MutexLock lock(&mutex_);
    if (free_.empty()) return all_.emplace_back(std::make_unique<Cells>()).get();
    Cells* cells = free_.back();
    free_.pop_back();
    return cells;
  }
  void GiveBack(Cells* cells) {
    absl::MutexLock lock(&mutex_);
    free_.push_back(cells);
  }
  double Sum(int cell) const {
    absl::MutexLock lock(&mutex_);
    double sum = 0;
    for (const auto& cells : all_) sum += cells->Read(cell);
    return sum;
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<std::unique_ptr<Cells>> all_ ABSL_GUARDED_BY(mutex_);
  std::vector<Cells*> free_ ABSL_GUARDED_BY(mutex_);
};

// What a thread has taken; it goes back when the thread ends.
struct ThreadMetrics::Held {
  struct Set {
    uint64_t id;
    std::shared_ptr<Pool> pool;
    Cells* cells;
  };
  ~Held() {
    last_used_ = {};
    for (Set& set : sets) set.pool->GiveBack(set.cells);
  }
  std::vector<Set> sets;  // of each ThreadMetrics that the thread has written to
};

ThreadMetrics::ThreadMetrics()
    : id_([] {
        static std::atomic<uint64_t> last{0};
        return ++last;
      }()),
      pool_(std::make_shared<Pool>()) {}

ThreadMetrics::~ThreadMetrics() = default;

ThreadMetrics::Cells& ThreadMetrics::FindMine() {
  thread_local Held held;
  auto mine = std::find_if(held.sets.begin(), held.sets.end(),
                           [this](const Held::Set& set) { return set.id == id_; });
  if (mine == held.sets.end()) {
    // Pools that no ThreadMetrics has any more go with the last thread that has.
    std::erase_if(held.sets, [](const Held::Set& set) { return set.pool.use_count() == 1; });
    held.sets.push_back({id_, pool_, pool_->Take()});
    mine = held.sets.end() - 1;
  }
  last_used_ = {id_, mine->cells};
  return *mine->cells;
}

void ThreadMetrics::Histogram::Observe(double value) const {
  const auto bucket = std::lower_bound(bounds_->begin(), bounds_->end(), value);
  owner_->Add(first_, value);
  owner_->Add(first_ + 1 + static_cast<int>(bucket - bounds_->begin()), 1);
}

ThreadMetrics::Series& ThreadMetrics::AddSeries(const std::string& name, const char* help,
                                                MetricType type, const Labels& labels,
                                                const Buckets& bounds) {
  absl::MutexLock lock(&mutex_);
  Family& family = families_[name];
  family.help = help;
  family.type = type;
  auto [at, is_new] = family.series.try_emplace(labels);
  Series& series = at->second;
  if (!is_new) return series;
  series.labels = labels;
  series.bounds = bounds;
  series.first = cells_;
  cells_ += type == MetricType::Histogram ? static_cast<int>(bounds.size()) + 2 : 1;
  CHECK(cells_ <= Cells::kMost) << name;  // series are ours and the engine's, none a caller's
  return series;
}

ThreadMetrics::Number ThreadMetrics::AddCounter(const std::string& name, const char* help,
                                                const Labels& labels) {
  return Number(*this, AddSeries(name, help, MetricType::Counter, labels, {}).first);
}

ThreadMetrics::Number ThreadMetrics::AddGauge(const std::string& name, const char* help,
                                              const Labels& labels) {
  return Number(*this, AddSeries(name, help, MetricType::Gauge, labels, {}).first);
}

ThreadMetrics::Histogram ThreadMetrics::AddHistogram(const std::string& name, const char* help,
                                                     const Labels& labels, const Buckets& bounds) {
  const Series& series = AddSeries(name, help, MetricType::Histogram, labels, bounds);
  return Histogram(*this, series.first, series.bounds);
}

std::vector<prometheus::MetricFamily> ThreadMetrics::Collect() const {
  absl::MutexLock lock(&mutex_);
  std::vector<prometheus::MetricFamily> families;
  for (const auto& [name, family] : families_) {
    prometheus::MetricFamily& out = families.emplace_back();
    out.name = name;
    out.help = family.help;
    out.type = family.type;
    for (const auto& [labels, series] : family.series) {
      prometheus::ClientMetric& metric = out.metric.emplace_back();
      for (const auto& [key, value] : labels) metric.label.push_back({key, value});
      const double first = pool_->Sum(series.first);
      if (family.type != MetricType::Histogram) {
        metric.counter.value = first;
        // What one thread has taken may be seen before what another had added.
        metric.gauge.value = std::max(first, 0.0);
        continue;
      }
      metric.histogram = ReadHistogram(series, first);
    }
  }
  return families;
}

prometheus::ClientMetric::Histogram ThreadMetrics::ReadHistogram(const Series& series,
                                                                 double sum) const {
  prometheus::ClientMetric::Histogram histogram;
  histogram.sample_sum = sum;
  uint64_t count = 0;
  for (size_t n = 0; n <= series.bounds.size(); ++n) {
    count += static_cast<uint64_t>(pool_->Sum(series.first + 1 + static_cast<int>(n)));
    const bool last = n == series.bounds.size();
    const double bound = last ? std::numeric_limits<double>::infinity() : series.bounds[n];
    histogram.bucket.push_back({count, bound});
  }
  histogram.sample_count = count;
  return histogram;
}

}  // namespace attnd
