#include "client/cli/bench/module_bench.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <limits>
#include <memory>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/cost.h"
#include "attention/random_problem.h"
#include "base/status_macros.h"
#include "client/cli/json_text.h"
#include "client/cli/load_generator.h"
#include "client/cli/problem_flags.h"
#include "client/cli/table.h"
#include "client/modules/module_client.h"
#include "modules/graph.h"
#include "modules/known_layers.h"
#include "modules/plan.h"
#include "modules/weight_table.h"
#include "proto/attnd/v1/module_codec.h"

namespace attnd {
namespace {

std::string RandomElements(Random& random, int64_t count, ElementType element, double size) {
  std::string bytes(static_cast<size_t>(count * ElementBytes(element)), '\0');
  for (int64_t n = 0; n < count; ++n) {
    StoreElement(element, bytes.data(), n, static_cast<float>(size * random.Normal()));
  }
  return bytes;
}

absl::Span<const std::byte> AsBytes(const std::string& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

struct BenchedSizes {
  ModuleLayout layout;
  int64_t batch = 1, length = 1;
  int64_t rows() const { return batch * length; }
};

absl::StatusOr<BenchedSizes> SizesOf(const ModuleBenchFlags& flags, ElementType element) {
  const KnownModel& model = *KnownModelNamed(flags.module);
  BenchedSizes sizes{.length = model.length};
  if (!flags.rows.empty()) {
    ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ParseNumbers("--rows", flags.rows, ','));
    if (rows.size() != 2 || rows[0] > 65536 || rows[1] > 65536) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rows: expected BATCH,LENGTH up to 65536 each, got ", flags.rows));
    }
    sizes.batch = rows[0];
    sizes.length = rows[1];
  }
  LayerSizes layers = model.sizes;
  if (flags.layers > 0) layers.layers = flags.layers;
  layers.element = element;
  sizes.layout = model.layers(layers);
  return sizes;
}

// Attention of one layer, forward and backward.
double AttentionFlops(const AttentionOp& op, const BenchedSizes& sizes) {
  Problem p = op.options;
  p.batch = sizes.batch;
  p.q_len = p.kv_len = sizes.length;
  p.q_heads = op.q.heads;
  p.kv_heads = op.k.heads;
  p.qk_head_dim = op.q.dim;
  p.v_head_dim = op.v.dim;
  return Flops(p, Direction::kForward) + Flops(p, Direction::kBackward);
}

// A registered module and what one step sends it.
class BenchedModule {
 public:
  // The client outlives it.
  BenchedModule(AttentionClient& client, BenchedSizes sizes)
      : attention_(client), client_(client), sizes_(std::move(sizes)) {}

  absl::Status Register() {
    v1::RegisterModuleRequest request;
    request.set_name(absl::StrCat("attnctl-bench-", getpid()));
    *request.mutable_layout() = EncodeModuleLayout(sizes_.layout);
    request.mutable_optimizer()->mutable_adamw()->set_beta1(0.9);
    request.mutable_optimizer()->mutable_adamw()->set_beta2(0.999);
    request.mutable_optimizer()->mutable_adamw()->set_epsilon(1e-8);
    request.mutable_limits()->set_max_rows(static_cast<uint64_t>(sizes_.rows()));
    request.mutable_limits()->set_kept_rows(static_cast<uint64_t>(sizes_.rows()));
    ASSIGN_OR_RETURN(ModuleRegistration made, client_.Register(request, {}, 0));
    module_ = std::move(made.module);
    plan_ = made.reply.plan();
    absl::Status status = PutWeights();
    if (!status.ok()) module_->Release({}).IgnoreError();
    return status;
  }

  absl::Status Step(std::vector<double> (&seconds)[3]) {
    v1::ModuleForwardHeader header;
    header.mutable_rows()->set_batch(static_cast<uint32_t>(sizes_.batch));
    header.mutable_rows()->set_length(static_cast<uint32_t>(sizes_.length));
    header.set_training(true);
    std::unique_ptr<RemoteModule::Activations> kept;
    absl::Time begun = absl::Now();
    auto lap = [&](int stage) {
      const absl::Time now = absl::Now();
      seconds[stage].push_back(absl::ToDoubleSeconds(now - std::exchange(begun, now)));
    };
    RETURN_IF_ERROR(module_->Forward(header, {.x = AsBytes(x_)}, Out(), {}, &kept));
    lap(0);
    RETURN_IF_ERROR(module_->Backward(*kept, AsBytes(dy_), false, {.dx = Out()}, {}));
    lap(1);
    v1::StepRequest step;
    step.add_group()->set_learning_rate(1e-5);
    RETURN_IF_ERROR(module_->Step(std::move(step), {}).status());
    lap(2);
    return absl::OkStatus();
  }

  absl::Status Release() { return module_->Release({}); }
  const v1::Plan& plan() const { return plan_; }
  const BenchedSizes& sizes() const { return sizes_; }
  int64_t bytes() const { return 4 * static_cast<int64_t>(x_.size()); }  // x, y, dy, dx

 private:
  absl::Span<std::byte> Out() const { return {out_.get(), x_.size()}; }

  absl::Status PutWeights() {
    ASSIGN_OR_RETURN(const ModuleGraph graph, ModuleGraph::Make(sizes_.layout));
    const WeightTable table(graph);
    Random random(1);
    SentPut put;
    for (const WeightEntry& entry : table.entries()) {
      SentTensor tensor;
      tensor.header.set_kind(v1::TENSOR_KIND_WEIGHT);
      tensor.header.set_name(entry.name);
      tensor.header.set_element(v1::ELEMENT_FLOAT32);
      for (const int64_t n : entry.shape) tensor.header.add_shape(static_cast<uint32_t>(n));
      tensor.bytes = std::make_shared<const std::string>(
          RandomElements(random, entry.elements, ElementType::kFloat32, 0.02));
      put.tensors.push_back(std::move(tensor));
    }
    put.commit.set_complete(true);
    const int64_t numbers = sizes_.rows() * sizes_.layout.width;
    x_ = RandomElements(random, numbers, sizes_.layout.element, 1);
    dy_ = RandomElements(random, numbers, sizes_.layout.element, 1e-3);
    ASSIGN_OR_RETURN(out_, attention_.Allocate(static_cast<int64_t>(x_.size())));
    return module_->Put(std::move(put), {});
  }

  AttentionClient& attention_;
  ModuleClient client_;
  const BenchedSizes sizes_;
  std::unique_ptr<RemoteModule> module_;
  v1::Plan plan_;
  std::string x_, dy_;
  std::shared_ptr<std::byte> out_;  // y, then dx; shared with a daemon on this host
};

constexpr const char* kStages[] = {"forward", "backward", "step"};

void ShowModule(const Session& session, const BenchedModule& module,
                std::vector<double> (&seconds)[3]) {
  for (std::vector<double>& stage : seconds) std::sort(stage.begin(), stage.end());
  double whole = 0;
  nlohmann::ordered_json json = {{"engine", module.plan().engine()},
                                 {"rows", module.sizes().rows()},
                                 {"steps", seconds[0].size()},
                                 {"bytes_per_step", module.bytes()}};
  Table table({"call", "p50", "p90", "p99"});
  for (int n = 0; n < 3; ++n) {
    std::vector<Cell> row = {kStages[n]};
    for (const int percent : {50, 90, 99}) {
      const double value = PercentileOf(seconds[n], percent);
      if (percent == 50) whole += value;
      json[kStages[n]][absl::StrCat("p", percent, "_seconds")] = value;
      row.push_back(SecondsText(value));
    }
    table.Add(std::move(row));
  }
  const v1::Plan& plan = module.plan();
  const double flops = (plan.forward_flops() + plan.backward_flops()) / whole;
  json["rows_per_second"] = static_cast<double>(module.sizes().rows()) / whole;
  json["flops_per_second"] = flops;
  if (session.json()) {
    std::cout << JsonText(json) << "\n";
    return;
  }
  std::cout << "engine " << plan.engine() << ", " << module.sizes().rows() << " rows a step, "
            << seconds[0].size() << " steps, " << BytesText(static_cast<double>(module.bytes()))
            << " moved a step\n";
  table.Print(std::cout, session.color());
  std::cout << NumberText(static_cast<double>(module.sizes().rows()) / whole) << " rows a second, "
            << FlopsText(flops) << " of linear ops\n";
}

absl::Status MeasureModule(BenchedModule& module, absl::Duration warmup, absl::Duration duration,
                           std::vector<double> (&seconds)[3]) {
  for (const absl::Duration part : {warmup, duration}) {
    for (std::vector<double>& stage : seconds) stage.clear();
    const absl::Time end = absl::Now() + part;
    do {
      RETURN_IF_ERROR(module.Step(seconds));
    } while (absl::Now() < end);
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> BenchedModules() {
  std::vector<std::string> names;
  for (const KnownModel& model : KnownModels()) names.push_back(model.name);
  return names;
}

absl::StatusOr<StepWork> WorkOfModule(const ModuleBenchFlags& flags, ElementType element) {
  ASSIGN_OR_RETURN(const BenchedSizes sizes, SizesOf(flags, element));
  ASSIGN_OR_RETURN(const ModuleGraph graph, ModuleGraph::Make(sizes.layout));
  OptimizerSpec optimizer;
  optimizer.kind = OptimizerKind::kAdamW;
  const ModuleLimits limits = {
      .max_rows = sizes.rows(), .kept_rows = sizes.rows(), .recompute = Recompute::kNone};
  ASSIGN_OR_RETURN(const ModulePlan plan, MakePlan(graph, WeightTable(graph), optimizer, limits,
                                                   std::numeric_limits<int64_t>::max()));
  StepWork work;
  work.flops = plan.forward_flops + plan.backward_flops;
  for (int64_t layer = 0; layer < graph.layers(); ++layer) {
    for (const ModuleOp& op : graph.BlockOf(layer).ops) {
      const auto* attention = std::get_if<AttentionOp>(&op.kind);
      if (attention != nullptr) work.flops += AttentionFlops(*attention, sizes);
    }
  }
  // x and dy go there, y and dx come back, each when the one before has arrived.
  work.bytes = 4.0 * static_cast<double>(sizes.rows() * sizes.layout.width * ElementBytes(element));
  work.device_bytes = static_cast<double>(plan.bytes());
  return work;
}

absl::Status BenchModule(Session& session, const ModuleBenchFlags& flags, ElementType element,
                         absl::Duration warmup, absl::Duration duration) {
  ASSIGN_OR_RETURN(BenchedSizes sizes, SizesOf(flags, element));
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  BenchedModule module(*client, std::move(sizes));
  RETURN_IF_ERROR(module.Register());
  std::vector<double> seconds[3];
  absl::Status status = MeasureModule(module, warmup, duration, seconds);
  module.Release().IgnoreError();
  RETURN_IF_ERROR(status);
  ShowModule(session, module, seconds);
  return absl::OkStatus();
}

}  // namespace attnd
