// How long layers take on the GPU of this machine: forward, backward and an AdamW step of whole
// stacks in the engine, without a daemon, from and to page-locked memory as there: medians in ms,
// and hashes of y, dx and a weight. With TRACE also where one forward and one backward spend their
// time, kernel by kernel, and FILE.json of both for Perfetto (a kernel's time reaches to the next
// one's begin, so gaps count with the kernel before them). Each stack runs op by op, in segments by
// their bounds and as a search has found (both: without that), in turns, and the hashes are
// compared. Before that it says what the search chose, and (search) how near that is to the best of
// all schemes. With --encoder instead encoder layers of 16,384 rows: ms of one layer of four, as
// computing alone takes, without transfers.
// Usage: layers_benchmark [--fusion=off|bound|both|measured|search] [--encoder]
//            [float16|bfloat16] [DROPOUT/256] [FILE prefix of traces]
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "kernels/cuda/device/driver_device.h"
#include "kernels/layers/cuda/cuda_module_engine.h"
#include "kernels/layers/cuda/device_bench.h"
#include "kernels/layers/executor/executor_instance.h"
#include "modules/known_layers.h"
#include "modules/op_uses.h"
#include "modules/segments/search.h"

namespace attnd {
namespace {

constexpr int kRounds = 9, kWarmRounds = 3;

template <class T>
T Value(absl::StatusOr<T> result) {
  CHECK(result.ok()) << result.status().ToString();
  return *std::move(result);
}

// Kernels of one call, by events that are recorded before each and after the last.
class Timeline {
 public:
  absl::StatusOr<bool> Note(const Driver& driver, StreamRef stream, std::string name) {
    if (!is_on_) return false;
    absl::StatusOr<Event> event = Event::Create(driver, /*timed=*/true);
    if (!event.ok()) return event.status();
    const absl::Status status = stream.Record(*event);
    if (!status.ok()) return status;
    events_.emplace_back(std::move(name), *std::move(event));
    return false;
  }
  void Begin() {
    events_.clear();
    is_on_ = true;
  }
  void End() { is_on_ = false; }

  // The last kernel's end is not known: it is left out.
  void Print(const std::string& title, const std::string& file) {
    std::map<std::string, std::pair<int, double>> sums;
    std::FILE* json = file.empty() ? nullptr : std::fopen(file.c_str(), "w");
    if (json != nullptr) std::fputs("{\"traceEvents\":[", json);
    double all = 0;
    for (size_t n = 0; n + 1 < events_.size(); ++n) {
      const double begin = Value(events_[n].second.SecondsSince(events_[0].second));
      const double seconds = Value(events_[n + 1].second.SecondsSince(events_[n].second));
      auto& [count, sum] = sums[events_[n].first];
      ++count;
      sum += seconds;
      all += seconds;
      if (json == nullptr) continue;
      std::fprintf(json,
                   "%s\n{\"ph\":\"X\",\"pid\":1,\"tid\":1,\"name\":\"%s\",\"ts\":%.3f,"
                   "\"dur\":%.3f}",
                   n == 0 ? "" : ",", events_[n].first.c_str(), begin * 1e6, seconds * 1e6);
    }
    if (json != nullptr) {
      std::fputs("\n]}\n", json);
      std::fclose(json);
    }
    std::vector<std::pair<double, std::string>> order;
    for (const auto& [name, of] : sums) order.emplace_back(-of.second, name);
    std::sort(order.begin(), order.end());
    std::printf("  %s: %zu kernels, %.3f ms\n", title.c_str(), events_.size(), all * 1e3);
    for (const auto& [key, name] : order) {
      const auto& [count, sum] = sums[name];
      std::printf("    %8.3f ms %5d x %8.1f us  %s\n", sum * 1e3, count, sum * 1e6 / count,
                  name.c_str());
    }
    events_.clear();
  }

 private:
  bool is_on_ = false;
  std::vector<std::pair<std::string, Event>> events_;
};

std::vector<std::byte> RandomBytes(Random& random, ElementType element, int64_t count,
                                   double scale) {
  std::vector<std::byte> bytes(count * ElementBytes(element));
  for (int64_t n = 0; n < count; ++n) {
    StoreElement(element, bytes.data(), n, static_cast<float>(scale * random.Normal()));
  }
  return bytes;
}

uint32_t HashOf(absl::Span<const std::byte> bytes) {
  uint32_t hash = 0x811c9dc5;
  for (const std::byte byte : bytes) hash = (hash ^ static_cast<uint32_t>(byte)) * 0x01000193;
  return hash;
}

struct Model {
  const char* name;
  ModuleLayout (*layers)(const LayerSizes& sizes);
  LayerSizes sizes;
  int64_t batch, length;
  bool of_a_layer = false;  // without transfers; else the whole stack with them
};

std::shared_ptr<const ModuleDescription> DescriptionOf(ModuleLayout layout) {
  OptimizerSpec adamw{.kind = OptimizerKind::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  return std::make_shared<ModuleDescription>(Value(ModuleGraph::Make(std::move(layout))),
                                             std::move(adamw));
}

class Case {
 public:
  Case(cuda::CudaBackend& backend, ModuleEngine& engine, const Model& model)
      : backend_(backend),
        random_(1),
        module_(DescriptionOf(model.layers(model.sizes))),
        model_(model) {
    rows_ = {.batch = model.batch, .length = model.length};
    const ModuleLimits limits{.max_rows = rows_.rows(), .kept_rows = rows_.rows()};
    const EnginePlan plan = Value(engine.Plan(*module_, limits, int64_t{1} << 36));
    instance_ = Value(engine.Make(module_, limits, plan));
    const std::vector<std::byte> weights =
        RandomBytes(random_, ElementType::kFloat32, int64_t{1} << 20, 0.02);
    for (size_t n = 0; n < module_->table.entries().size(); ++n) {
      const int64_t bytes = module_->table.entries()[n].elements * 4;
      std::vector<std::byte> own;
      for (int64_t left = bytes; left > 0; left -= static_cast<int64_t>(weights.size())) {
        own.insert(own.end(), weights.begin(),
                   weights.begin() + std::min<int64_t>(left, weights.size()));
      }
      CHECK(instance_->Put(n, TensorRole::kWeight, ElementType::kFloat32, own).ok());
    }
    const int64_t numbers = rows_.rows() * module_->graph.layout().width;
    const ElementType element = module_->graph.layout().element;
    x_ = RandomBytes(random_, element, numbers, 1);
    dy_ = RandomBytes(random_, element, numbers, 1e-3);
    y_ = dx_ = x_;
    for (std::vector<std::byte>* of : {&x_, &dy_, &y_, &dx_}) {
      CHECK(backend_.RegisterHost(absl::MakeSpan(*of)).ok());
    }
  }
  ~Case() {
    for (std::vector<std::byte>* of : {&x_, &dy_, &y_, &dx_}) {
      backend_.UnregisterHost(absl::MakeSpan(*of));
    }
  }

  struct Figures {
    std::vector<double> ms[3];
    std::array<uint32_t, 3> hashes = {};
  };
  void RunRound(int round, Figures& figures) {
    const std::array<double, 3> times = RunOnce(nullptr, "", "");
    if (round == 0) figures.hashes = {HashOf(y_), HashOf(dx_), HashOf(FirstWeight())};
    for (int n = 0; n < 3 && round >= kWarmRounds; ++n) figures.ms[n].push_back(times[n]);
  }
  void Print(const char* fusion, Figures figures) const {
    for (std::vector<double>& of : figures.ms) std::sort(of.begin(), of.end());
    std::printf("%-10s %4ld %2ld %3ld x %5ld  %-5s  forward %8.3f  backward %8.3f  step %7.3f",
                model_.name, static_cast<long>(model_.sizes.width),
                static_cast<long>(model_.sizes.heads), static_cast<long>(rows_.batch),
                static_cast<long>(rows_.length), fusion, figures.ms[0][kRounds / 2],
                figures.ms[1][kRounds / 2], figures.ms[2][kRounds / 2]);
    std::printf("  bits %08x %08x %08x\n", figures.hashes[0], figures.hashes[1], figures.hashes[2]);
    std::fflush(stdout);
  }
  void Trace(const std::string& name, Timeline& timeline, const std::string& trace) {
    RunOnce(&timeline, name, trace);
  }

 private:
  std::array<double, 3> RunOnce(Timeline* timeline, const std::string& name,
                                const std::string& trace) {
    TransferSeconds transfers;
    const auto measure = [&](const char* what, const auto& body) {
      if (timeline != nullptr) timeline->Begin();
      transfers = {};
      const auto start = std::chrono::steady_clock::now();
      body();
      const std::chrono::duration<double, std::milli> spent =
          std::chrono::steady_clock::now() - start;
      if (timeline != nullptr) {
        timeline->End();
        timeline->Print(what,
                        trace + name + "_" + std::to_string(rows_.rows()) + "_" + what + ".json");
      }
      if (!model_.of_a_layer) return spent.count();
      return (spent.count() - 1e3 * (transfers.upload + transfers.download)) /
             static_cast<double>(model_.sizes.layers);
    };
    std::array<double, 3> times;
    ActivationId kept = 0;
    times[0] = measure("forward", [&] {
      kept = Value(instance_->Forward({.rows = &rows_,
                                       .dropout = {.is_training = true, .seed = 1},
                                       .x = x_,
                                       .keep = true,
                                       .y = absl::MakeSpan(y_),
                                       .transfers = &transfers}));
    });
    times[1] = measure("backward", [&] {
      CHECK(instance_
                ->Backward({.activation = kept,
                            .dy = dy_,
                            .dx = absl::MakeSpan(dx_),
                            .transfers = &transfers})
                .ok());
    });
    instance_->DropActivation(kept);
    const GroupRates rates[] = {{.learning_rate = 1e-5, .weight_decay = 0.01}};
    times[2] = measure("step", [&] { Value(instance_->Step({.groups = rates})); });
    return times;
  }

  std::vector<std::byte> FirstWeight() const {
    std::vector<std::byte> bytes(module_->table.entries()[0].elements * 4);
    CHECK(
        instance_->Get(0, TensorRole::kWeight, ElementType::kFloat32, absl::MakeSpan(bytes)).ok());
    return bytes;
  }

  cuda::CudaBackend& backend_;
  Random random_;
  const std::shared_ptr<const ModuleDescription> module_;
  const Model model_;
  std::unique_ptr<ModuleInstance> instance_;
  CallRows rows_;
  std::vector<std::byte> x_, dy_, y_, dx_;
};

// Measures once more what a search has chosen for the first block of a stack.
class SearchTable {
 public:
  SearchTable(cuda::CudaBackend& backend, const Model& model, BlockChoice choice)
      : module_(DescriptionOf(model.layers(model.sizes))), choice_(std::move(choice)) {
    const int64_t rows = model.batch * model.length;
    const ModuleLimits limits{.max_rows = rows, .kept_rows = rows};
    auto device = std::make_unique<CudaDevice>(backend);
    CudaDevice& gpu = *device;
    const EnginePlan plan =
        Value(ExecutorInstance::Plan(*module_, limits, int64_t{1} << 36, *device));
    instance_ = Value(ExecutorInstance::Make(module_, limits, plan, std::move(device)));
    bench_ = Value(DeviceBench::Make(*instance_, gpu, nullptr));
    sampler_.emplace(*bench_, PartSampler::Budget{1 << 20, 600}, &PartSampler::MonotonicNow);
    tuning_ = {RowsBucket(rows), choice_.products};
    const GpuRates& rates = GpuOfArchitecture(backend.info().architecture);
    bound_ = BoundScheme(module_->graph, 0, {rows, 0}, rates);
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      const std::vector<CostedSegment> costs =
          BoundCosts(module_->graph, 0, direction, {rows, 0}, rates);
      lone_[static_cast<int>(direction)] = LonePlaces(costs.back().end, costs);
    }
  }

  void Print(bool with_all) {
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      const auto of = [direction](const BlockEnds& ends) -> const SegmentEnds& {
        return direction == Direction::kForward ? ends.forward : ends.backward;
      };
      const SegmentMatcher matcher(module_->graph, 0, direction);
      const SegmentEnds &chosen = of(choice_.ends), &bound = of(bound_);
      const SegmentEnds off = of(SingleOps(module_->graph, 0));
      std::printf("  %s  %s\n", direction == Direction::kForward ? "forward " : "backward",
                  TextOf(matcher, chosen).c_str());
      const std::vector<SegmentPart> parts = {PartOf(matcher, direction, off, true),
                                              PartOf(matcher, direction, bound, true),
                                              PartOf(matcher, direction, chosen, true)};
      const ProductTuning none;
      const PartSampler::Candidate all[] = {
          {parts[0], none}, {parts[1], none}, {parts[2], none}, {parts[2], tuning_}};
      const std::vector<double> us = Value(sampler_->Measure(all));
      std::printf(
          "    a layer without attention, us: off %.1f  bound %.1f  measured segments %.1f  "
          "and products %.1f%s\n",
          us[0], us[1], us[2], us[3], chosen == bound ? "  (segments as by bounds)" : "");
      if (with_all) PrintBest(matcher, direction, bound, chosen);
    }
    for (const auto& [key, choice] : choice_.products) {
      std::printf("    product of kind %d, %ld x %ld:%s%s%s\n", static_cast<int>(key.kind),
                  static_cast<long>(key.columns), static_cast<long>(key.other),
                  !choice.small.has_value() ? ""
                  : *choice.small           ? " small tiles"
                                            : " large tiles",
                  choice.gradient_columns == 0
                      ? ""
                      : absl::StrCat(" ", choice.gradient_columns, " columns").c_str(),
                  choice.apart ? " apart" : "");
    }
    std::fflush(stdout);
  }

 private:
  static constexpr size_t kMostSchemes = 1000;

  std::string TextOf(const SegmentMatcher& matcher, const SegmentEnds& ends) const {
    std::string text;
    int64_t first = 0;
    for (int64_t end : ends) {
      absl::StrAppend(&text, text.empty() ? "" : " ", end > first + 1 ? "[" : "");
      for (int64_t place = first; place < end; ++place) {
        const ModuleOp& op = module_->graph.layout().blocks[0].ops[matcher.order().ops[place]];
        absl::StrAppend(&text, place > first ? " " : "", OpName(op));
      }
      absl::StrAppend(&text, end > first + 1 ? "]" : "");
      first = end;
    }
    return text;
  }
  // `whole`: what every scheme runs alone too.
  SegmentPart PartOf(const SegmentMatcher& matcher, Direction direction, const SegmentEnds& ends,
                     bool whole) const {
    SegmentPart part{.direction = direction};
    int64_t first = 0;
    for (int64_t end : ends) {
      if (whole || !lone_[static_cast<int>(direction)][first]) {
        part.segments.push_back(Value(matcher.Match(first, end)));
      }
      first = end;
    }
    return part;
  }
  // All schemes, without what all run alone. The best one is measured beside the chosen one again,
  // since the least of many is less than it is.
  void PrintBest(const SegmentMatcher& matcher, Direction direction, const SegmentEnds& bound,
                 const SegmentEnds& chosen) {
    const std::vector<SegmentEnds> schemes = AllSchemes(matcher, kMostSchemes);
    std::vector<SegmentPart> parts;
    for (const SegmentEnds& ends : schemes) {
      parts.push_back(PartOf(matcher, direction, ends, false));
    }
    const ProductTuning none;
    std::vector<PartSampler::Candidate> all;
    for (const SegmentPart& part : parts) all.push_back({part, none});
    const std::vector<double> us = Value(sampler_->Measure(all));
    CHECK(!us.empty());
    const auto best = std::min_element(us.begin(), us.end()) - us.begin();
    const SegmentPart of_chosen = PartOf(matcher, direction, chosen, false);
    const SegmentPart of_bound = PartOf(matcher, direction, bound, false);
    const PartSampler::Candidate again[] = {
        {parts[best], none}, {of_chosen, none}, {of_bound, none}};
    const std::vector<double> beside = Value(sampler_->Measure(again));
    std::printf(
        "    of %zu schemes, where they differ, us: best %.1f  chosen %.1f (%+.1f %%)  bound "
        "%.1f (%+.1f %%)  worst %.1f\n      best: %s\n",
        schemes.size(), beside[0], beside[1], 100 * (beside[1] / beside[0] - 1), beside[2],
        100 * (beside[2] / beside[0] - 1), *std::max_element(us.begin(), us.end()),
        TextOf(matcher, schemes[best]).c_str());
  }

  const std::shared_ptr<const ModuleDescription> module_;
  const BlockChoice choice_;
  std::unique_ptr<ExecutorInstance> instance_;
  std::unique_ptr<DeviceBench> bench_;
  std::optional<PartSampler> sampler_;
  ProductTuning tuning_;
  BlockEnds bound_;
  std::array<std::vector<bool>, 2> lone_;  // [direction][place]: LonePlaces
};

struct Way {
  const char* name;
  Fusion fusion;
};
constexpr Way kOff = {"off", Fusion::kOff}, kBound = {"bound", Fusion::kBound},
              kMeasured = {"meas.", Fusion::kMeasured};

// One stack, cut in each of these ways, in turns.
class Runner {
 public:
  Runner(cuda::CudaBackend& backend, std::vector<Way> ways, bool with_all, Timeline& timeline,
         std::string trace)
      : backend_(backend),
        ways_(std::move(ways)),
        with_all_(with_all),
        timeline_(timeline),
        trace_(std::move(trace)) {
    std::string folder = std::filesystem::temp_directory_path() / "attnd_plans.XXXXXX";
    CHECK(mkdtemp(folder.data()) != nullptr) << folder;
    folder_ = folder;
    cache_ = std::make_shared<PlanCache>(folder_);
  }
  ~Runner() { std::filesystem::remove_all(folder_); }

  void Run(const Model& model) {
    std::vector<std::unique_ptr<ModuleEngine>> engines;
    std::vector<std::unique_ptr<Case>> cases;
    for (const Way& way : ways_) {
      const std::shared_ptr<PlanSearch> search =
          way.fusion == Fusion::kMeasured ? SearchOnGpu(backend_, cache_) : nullptr;
      engines.push_back(MakeCudaModuleEngine(
          backend_, {.cut = CutsOnGpu(way.fusion, backend_.info()),
                     .search = search,
                     .part_bytes = model.of_a_layer ? 0 : CudaModuleOptions().part_bytes}));
      const auto make = [&] { return std::make_unique<Case>(backend_, *engines.back(), model); };
      if (search != nullptr) PrintSearch(model, *search, make);
      cases.push_back(make());
    }
    std::vector<Case::Figures> figures(cases.size());
    for (int round = 0; round < kWarmRounds + kRounds; ++round) {
      for (size_t n = 0; n < cases.size(); ++n) cases[n]->RunRound(round, figures[n]);
    }
    for (size_t n = 0; n < cases.size(); ++n) {
      cases[n]->Print(ways_[n].name, figures[n]);
      if (!trace_.empty()) {
        cases[n]->Trace(std::string(model.name) + "_" + ways_[n].name, timeline_, trace_);
      }
      CHECK(figures[n].hashes == figures[0].hashes) << model.name << ": other bits";
    }
  }

 private:
  template <class Make>
  void PrintSearch(const Model& model, const PlanSearch& search, const Make& make) {
    make();
    const SearchTotals first = search.totals();
    make();
    const SearchTotals second = search.totals();
    std::printf("%s %ld x %ld  search: %ld samples in %.3f s; of a second module %ld samples\n",
                model.name, static_cast<long>(model.batch), static_cast<long>(model.length),
                static_cast<long>(first.samples), first.seconds,
                static_cast<long>(second.samples - first.samples));
    const int64_t rows = model.batch * model.length;
    const auto module = DescriptionOf(model.layers(model.sizes));
    std::optional<BlockChoice> choice =
        cache_->Get(search.KeyOf(module->graph, 0, {.max_rows = rows, .kept_rows = rows}));
    CHECK(choice.has_value()) << model.name;
    SearchTable(backend_, model, *std::move(choice)).Print(with_all_);
  }

  cuda::CudaBackend& backend_;
  const std::vector<Way> ways_;
  const bool with_all_;
  Timeline& timeline_;
  const std::string trace_;
  std::string folder_;
  std::shared_ptr<PlanCache> cache_;
};

int Main(int argc, char** argv) {
  std::vector<Way> ways = {kOff, kBound, kMeasured};
  bool with_all = false;
  if (argc > 1 && absl::StartsWith(argv[1], "--fusion=")) {
    const std::string of = std::string(argv[1]).substr(9);
    CHECK(of == "off" || of == "bound" || of == "both" || of == "measured" || of == "search") << of;
    if (of == "off") ways = {kOff};
    if (of == "bound") ways = {kBound};
    if (of == "both") ways = {kOff, kBound};
    with_all = of == "search";
    --argc, ++argv;
  }
  const bool is_encoder = argc > 1 && std::string(argv[1]) == "--encoder";
  if (is_encoder) --argc, ++argv;
  const bool is_bfloat = argc > 1 && std::string(argv[1]) == "bfloat16";
  const auto dropout = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 0);
  const std::string trace = argc > 3 ? argv[3] : "";
  Timeline timeline;
  auto gpu = cuda::MakeDriverDevice(
      {.stand_in = [&](const Driver& driver, StreamRef stream, const cuda::KernelStep& step) {
        return timeline.Note(driver, stream, NameOf(step.row));
      }});
  CHECK(gpu.ok()) << gpu.status();
  cuda::CudaBackend backend(*std::move(gpu));
  const auto sizes = [&](int64_t layers, int64_t width, int64_t heads, int64_t kv_heads,
                         int64_t inner) {
    return LayerSizes{.width = width,
                      .heads = heads,
                      .kv_heads = kv_heads,
                      .inner = inner,
                      .layers = layers,
                      .dropout = dropout,
                      .element = is_bfloat ? ElementType::kBFloat16 : ElementType::kFloat16};
  };
  std::vector<Model> models;
  if (is_encoder) {
    constexpr int64_t kWidths[][2] = {{768, 12}, {1024, 16}, {2048, 32}, {2048, 16}};
    for (const auto& [width, heads] : kWidths) {
      for (int64_t length : {512, 2048, 4096}) {
        models.push_back({"encoder", &BertLayers, sizes(4, width, heads, heads, 4 * width),
                          16384 / length, length, true});
      }
    }
  } else {
    models = {{"bert-base", &BertLayers, sizes(12, 768, 12, 12, 3072), 1, 512},
              {"bert-base", &BertLayers, sizes(12, 768, 12, 12, 3072), 8, 512},
              {"bert-base", &BertLayers, sizes(12, 768, 12, 12, 3072), 32, 512},
              {"gpt2", &GptLayers, sizes(12, 768, 12, 12, 3072), 16, 1024},
              {"llama-1b", &LlamaLayers, sizes(16, 2048, 32, 8, 8192), 1, 4096}};
  }
  std::printf("%s, %s, dropout %u/256, ms\n", backend.info().device.c_str(),
              is_bfloat ? "bfloat16" : "float16", dropout);
  Runner runner(backend, std::move(ways), with_all, timeline, trace);
  for (const Model& model : models) runner.Run(model);
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
