#include "server/app/encode_server_info.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "attention/masks/mask_description.h"
#include "base/check.h"

namespace attnd {
namespace {

Problem SmallProblem() {
  Problem p;
  p.element = ElementType::kFloat16;  // every engine has it
  p.batch = 1;
  p.q_heads = p.kv_heads = 2;
  p.q_len = p.kv_len = 32;
  p.qk_head_dim = p.v_head_dim = 64;
  return p;
}

std::shared_ptr<const MaskDescription> SmallMask(const Problem& problem) {
  const MaskSpec causal = {.pattern = {MaskExpr{RelativeWindow{-1, 0}, {}}}, .pattern_of = {0}};
  absl::StatusOr<std::shared_ptr<const MaskDescription>> mask =
      MaskDescription::Make(causal, MaskCallOf(problem));
  CHECK(mask.ok()) << mask.status();
  return *std::move(mask);
}

struct Feature {
  const char* name;
  std::function<void(Problem&)> use;
};

const std::vector<Feature>& Features() {
  static const std::vector<Feature> features = {
      {"float16", [](Problem& p) { p.element = ElementType::kFloat16; }},
      {"bfloat16", [](Problem& p) { p.element = ElementType::kBFloat16; }},
      {"float32", [](Problem& p) { p.element = ElementType::kFloat32; }},
      {"grouped_heads", [](Problem& p) { p.kv_heads = 1; }},
      {"v_head_dim", [](Problem& p) { p.v_head_dim = 32; }},
      {"head_dim_256", [](Problem& p) { p.qk_head_dim = p.v_head_dim = 256; }},
      {"causal", [](Problem& p) { p.causal = true; }},
      {"window", [](Problem& p) { p.window_left = 8; }},
      {"softcap", [](Problem& p) { p.softcap = 30; }},
      {"kv_lengths", [](Problem& p) { p.kv_lengths = {16}; }},
      {"packed",
       [](Problem& p) {
         p.layout = Layout::kPackedThd;
         p.cu_seqlens_q = p.cu_seqlens_k = {0, 32};
       }},
      {"bool_mask",
       [](Problem& p) {
         p.bool_mask = BoolMask{{1, 1, 32, 32}};
       }},
      {"masks", [](Problem& p) { p.mask = SmallMask(p); }},
      {"bias",
       [](Problem& p) {
         p.bias = Bias{ElementType::kFloat32, {1, 1, 32, 32}, false};
       }},
      {"bias_gradient",
       [](Problem& p) {
         p.bias = Bias{ElementType::kFloat32, {1, 1, 32, 32}, true};
       }},
      {"alibi",
       [](Problem& p) {
         p.alibi_slopes = {0.5f, 0.25f};
       }},
      {"dropout", [](Problem& p) { p.dropout.threshold = 26; }},
      {"zero_rest", [](Problem& p) { p.denominator = DenominatorKind::kZeroRest; }},
      {"sink",
       [](Problem& p) {
         p.denominator = DenominatorKind::kSink;
         p.sink_logits = {0, 0};
       }},
  };
  return features;
}

void DescribeLeases(const LeaseLimits& limits, v1::GetServerInfoResponse& reply) {
  const int64_t memory =
      std::accumulate(limits.device_bytes.begin(), limits.device_bytes.end(), limits.memory_bytes);
  if (memory > 0) reply.add_feature("residual");
  v1::ResidualLimits& out = *reply.mutable_residual();
  out.set_memory_bytes(static_cast<uint64_t>(memory));
  out.set_caller_memory_bytes(static_cast<uint64_t>(std::min(memory, limits.caller_bytes)));
  out.set_max_leases(static_cast<uint64_t>(limits.max_leases));
  out.set_ttl_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(limits.ttl)));
  out.set_max_ttl_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(limits.max_ttl)));
  out.set_min_hold_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(limits.min_hold)));
}

void DescribeDevice(const ServerOptions& options, const BackendInfo& info,
                    v1::GetServerInfoResponse& reply) {
  v1::Device* device = reply.add_device();
  device->set_name(info.device);
  device->set_uuid(info.uuid);
  device->set_backend(info.backend);
  device->set_architecture(info.architecture);
  device->set_memory_bytes(static_cast<uint64_t>(info.uuid.empty() ? options.admission.memory_bytes
                                                                   : info.memory_bytes));
  device->set_serving(true);
  device->set_threads(static_cast<uint32_t>(std::max(0, info.threads)));
}

}  // namespace

uint64_t NewBootEpoch() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

v1::GetServerInfoResponse DescribeServer(const ServerOptions& options,
                                         const std::vector<const Backend*>& engines,
                                         uint64_t boot_epoch) {
  v1::GetServerInfoResponse reply;
  reply.set_version(absl::StrCat(options.version, " (", options.revision, ")"));
  reply.set_boot_epoch(absl::StrFormat("%016x", boot_epoch));
  reply.set_max_message_bytes(static_cast<uint64_t>(options.transport.max_message_bytes));
  for (const Backend* engine : engines) DescribeDevice(options, engine->info(), reply);
  // A feature counts if every device has it: a call may go to any.
  for (const Feature& feature : Features()) {
    Problem problem = SmallProblem();
    feature.use(problem);
    auto supports = [&](const Backend* engine) {
      return engine->Supports(problem, Direction::kForward).ok() &&
             engine->Supports(problem, Direction::kBackward).ok();
    };
    if (std::all_of(engines.begin(), engines.end(), supports)) reply.add_feature(feature.name);
  }
  const auto captures = [](const Backend* engine) { return engine->SupportsCapture().ok(); };
  if (std::all_of(engines.begin(), engines.end(), captures)) reply.add_feature("capture");
  reply.add_feature("stream");
  reply.add_feature("mask_data");
  DescribeLeases(options.leases, reply);
  return reply;
}

}  // namespace attnd
