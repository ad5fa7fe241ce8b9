#include "client/c/conversions.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/c/mask.h"
#include "client/types/error_detail.h"

namespace attnd {
namespace {

using nlohmann::json;

std::string Text(const char* text) { return text == nullptr ? "" : text; }

std::vector<int32_t> Numbers(const attnd_int32_array& array) {
  return std::vector<int32_t>(array.data, array.data + array.count);
}

std::vector<float> Numbers(const attnd_float_array& array) {
  return std::vector<float>(array.data, array.data + array.count);
}

BroadcastShape Shape(const int64_t (&shape)[4]) { return {shape[0], shape[1], shape[2], shape[3]}; }

// Bytes that are not UTF-8 (they may come from a server) are replaced, never thrown over.
std::string Dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

void SetSizes(const attnd_problem& from, Problem& to) {
  to.batch = from.batch;
  to.q_heads = from.q_heads;
  to.kv_heads = from.kv_heads;
  to.q_len = from.q_len;
  to.kv_len = from.kv_len;
  to.qk_head_dim = from.qk_head_dim;
  to.v_head_dim = from.v_head_dim;
  to.element = static_cast<ElementType>(from.element);
  to.layout = static_cast<Layout>(from.layout);
}

void SetVisibility(const attnd_problem& from, Problem& to) {
  to.alignment = static_cast<Alignment>(from.alignment);
  to.offsets = Numbers(from.offsets);
  to.causal = from.causal != 0;
  if (from.has_window) {
    to.window_left = from.window_left;
    to.window_right = from.window_right;
  }
  to.kv_lengths = Numbers(from.kv_lengths);
  to.cu_seqlens_q = Numbers(from.cu_seqlens_q);
  to.cu_seqlens_k = Numbers(from.cu_seqlens_k);
  if (from.has_bool_mask) to.bool_mask = BoolMask{Shape(from.bool_mask_shape)};
}

void SetScores(const attnd_problem& from, Problem& to) {
  if (from.has_scale) to.scale = from.scale;
  to.softcap = from.softcap;
  if (from.has_bias) {
    to.bias = Bias{static_cast<ElementType>(from.bias_element), Shape(from.bias_shape),
                   from.bias_want_gradient != 0};
  }
  to.alibi_slopes = Numbers(from.alibi_slopes);
  to.dropout = {from.dropout_threshold, from.dropout_seed, from.dropout_offset};
  to.denominator = static_cast<DenominatorKind>(from.denominator);
  to.sink_logits = Numbers(from.sink_logits);
  to.accumulate = from.accumulate_float16 ? AccumulateType::kFloat16 : AccumulateType::kFloat32;
  to.allow_nondeterministic = from.allow_nondeterministic != 0;
}

}  // namespace

ClientOptions ToClientOptions(const attnd_client_options& from) {
  ClientOptions to;
  for (int64_t n = 0; n < from.address_count; ++n) to.addresses.push_back(from.addresses[n]);
  if (from.channels_per_address != 0) to.channels_per_address = from.channels_per_address;
  if (from.use_tls) {
    to.tls = ClientTlsOptions{Text(from.tls_ca_file), Text(from.tls_certificate_file),
                              Text(from.tls_key_file), Text(from.tls_server_name)};
  }
  to.bearer_token = Text(from.bearer_token);
  if (from.timeout_seconds != 0) to.timeout = absl::Seconds(from.timeout_seconds);
  if (from.max_attempts != 0) to.retry.max_attempts = from.max_attempts;
  to.wait_for_ready = from.wait_for_ready != 0;
  if (from.shard_bytes != 0) to.shard_bytes = from.shard_bytes;
  if (from.max_reply_bytes != 0) to.max_reply_bytes = from.max_reply_bytes;
  to.merge_partial_results = from.merge_partial_results != 0;
  to.proxy = Text(from.proxy);
  return to;
}

Problem ToProblem(const attnd_problem& given) {
  attnd_problem from = FullStructure(given);
  Problem to;
  SetSizes(from, to);
  SetVisibility(from, to);
  SetScores(from, to);
  if (from.mask != nullptr) {
    to.mask = from.mask->mask;
    to.mask_origin = from.mask->origin;
  }
  return to;
}

std::string DetailJson(const absl::Status& status) {
  auto detail = DetailOf(status);
  if (!detail) return "{}";
  json out = {
      {"reason", detail->reason}, {"domain", detail->domain}, {"metadata", detail->metadata}};
  if (detail->retry_delay) out["retry_after"] = absl::ToDoubleSeconds(*detail->retry_delay);
  return Dump(out);
}

// As ToKeptMap reads it. Empty: not kept.
std::string TokenText(const KeptAttentionMap& kept) {
  if (kept.token.empty()) return "";
  return absl::StrCat(kept.address, ":", absl::BytesToHexString(kept.token));
}

// NaN becomes null, since JSON has none.
json CapturedJson(const CapturedAttention& captured) {
  return {{"mean", captured.mean},
          {"variance", captured.variance},
          {"skewness", captured.skewness},
          {"distance", captured.distance ? json(*captured.distance) : json()},
          {"token", TokenText(captured.kept)}};
}

std::string ReceiptJson(const CallReceipt& receipt) {
  json stages = json::object();
  for (const CallReceipt::Stage& stage : receipt.stages) {
    stages[stage.name] = absl::ToDoubleSeconds(stage.total);
  }
  return Dump({{"backend", receipt.backend},
               {"device", receipt.device},
               {"kernel", receipt.kernel},
               {"accumulate", receipt.accumulate == AccumulateType::kFloat16 ? "f16" : "f32"},
               {"dropout_p_effective", receipt.dropout_p_effective},
               {"deterministic", receipt.deterministic},
               {"shards", receipt.shards},
               {"retries", receipt.retries},
               {"leased", receipt.leased},
               {"bytes_sent", receipt.bytes_sent},
               {"bytes_received", receipt.bytes_received},
               {"elapsed", absl::ToDoubleSeconds(receipt.elapsed)},
               {"stages", std::move(stages)},
               {"captured", receipt.captured ? CapturedJson(*receipt.captured) : json()}});
}

std::string ServerInfoJson(const ServerInfo& info) {
  json devices = json::array();
  for (const DeviceInfo& device : info.devices) {
    devices.push_back({{"name", device.name},
                       {"uuid", device.uuid},
                       {"backend", device.backend},
                       {"architecture", device.architecture},
                       {"memory_bytes", device.memory_bytes},
                       {"serving", device.serving},
                       {"threads", device.threads}});
  }
  return Dump({{"address", info.address},
               {"version", info.version},
               {"boot_epoch", info.boot_epoch},
               {"max_message_bytes", info.max_message_bytes},
               {"features", info.features},
               {"devices", std::move(devices)}});
}

std::string MaskReportJson(const MaskReport& report) {
  json devices = json::array();
  for (const MaskOnDevice& device : report.devices) {
    devices.push_back({{"device", device.device},
                       {"kernel_forward", device.kernel_forward},
                       {"kernel_backward", device.kernel_backward},
                       {"reason", device.reason},
                       {"tile_rows", device.tile_rows},
                       {"tile_keys", device.tile_keys},
                       {"tiles", device.tiles},
                       {"tiles_full", device.tiles_full},
                       {"tiles_partial", device.tiles_partial},
                       {"distinct_bitmaps", device.distinct_bitmaps},
                       {"plan_bytes", device.plan_bytes},
                       {"compile_nanoseconds", device.compile_nanoseconds}});
  }
  const absl::string_view id(reinterpret_cast<const char*>(report.id.data()), report.id.size());
  return Dump({{"id", absl::BytesToHexString(id)},
               {"bytes_held", report.bytes_held},
               {"visible", report.visible},
               {"empty_rows", report.empty_rows},
               {"devices", std::move(devices)}});
}

}  // namespace attnd
