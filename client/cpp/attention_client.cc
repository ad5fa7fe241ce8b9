#include "client/cpp/attention_client.h"

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/cpu_quota.h"
#include "base/status_macros.h"
#include "client/cpp/call_runner.h"
#include "client/cpp/connections.h"
#include "client/cpp/grpc_status.h"
#include "client/cpp/logical_call.h"
#include "client/cpp/message_limits.h"
#include "client/cpp/shard_plan.h"
#include "client/cpp/unary_call.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {
namespace {

// A shard smaller than this gains less by another connection than its own overhead costs.
constexpr int64_t kMinShardBytes = int64_t{1} << 20;
constexpr size_t kMaxRequestIdBytes = 64;

std::string RandomRequestId() {
  thread_local absl::BitGen random;
  return absl::StrFormat("%016x%016x", absl::Uniform<uint64_t>(random),
                         absl::Uniform<uint64_t>(random));
}

absl::Status MissingTensor(absl::string_view name) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": expected a tensor, got a null pointer"));
}

struct NamedPointer {
  absl::string_view name;
  const void* pointer;
  bool needed;
};

absl::Status CheckPointers(std::initializer_list<NamedPointer> pointers) {
  for (const NamedPointer& p : pointers) {
    if (p.needed && p.pointer == nullptr) return MissingTensor(p.name);
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(const Problem& p, const ForwardTensors& in, const ForwardOutputs& out) {
  return CheckPointers({{"q", in.q, true},
                        {"k", in.k, true},
                        {"v", in.v, true},
                        {"mask_bits", in.mask_bits, p.bool_mask.has_value()},
                        {"bias", in.bias, p.bias.has_value()},
                        {"o", out.o, true}});
}

absl::Status CheckTensors(const Problem& p, const BackwardTensors& in, const BackwardOutputs& out) {
  return CheckPointers({{"q", in.q, true},
                        {"k", in.k, true},
                        {"v", in.v, true},
                        {"mask_bits", in.mask_bits, p.bool_mask.has_value()},
                        {"bias", in.bias, p.bias.has_value()},
                        {"o", in.o, true},
                        {"lse", in.lse, true},
                        {"d_o", in.d_o, true},
                        {"d_q", out.d_q, true},
                        {"d_k", out.d_k, true},
                        {"d_v", out.d_v, true},
                        {"d_bias", out.d_bias, p.bias && p.bias->want_gradient},
                        {"d_sink", out.d_sink, p.denominator == DenominatorKind::kSink}});
}

ServerInfo FromProto(const v1::GetServerInfoResponse& reply, const std::string& address) {
  ServerInfo info;
  info.address = address;
  info.version = reply.version();
  info.boot_epoch = reply.boot_epoch();
  info.max_message_bytes = static_cast<int64_t>(reply.max_message_bytes());
  info.features.assign(reply.feature().begin(), reply.feature().end());
  for (const v1::Device& d : reply.device()) {
    info.devices.push_back({d.name(), d.uuid(), d.backend(), d.architecture(),
                            static_cast<int64_t>(d.memory_bytes()), d.serving(),
                            static_cast<int>(d.threads())});
  }
  return info;
}

}  // namespace

class AttentionClient::Impl {
 public:
  Impl(ClientOptions options, std::unique_ptr<Clock> clock,
       std::unique_ptr<Connections> connections)
      : options_(std::move(options)),
        clock_(std::move(clock)),
        connections_(std::move(connections)),
        budget_(options_.retry),
        limits_(connections_->address_count()),
        max_lanes_(std::min(connections_->count(), std::max(2, AvailableCpus()))),
        lane_threads_(max_lanes_),
        core_{options_, *clock_, *connections_, budget_, queues_, lane_threads_, max_lanes_} {}

  const ClientOptions& options() const { return options_; }

  template <class Tensors, class Outputs>
  absl::StatusOr<CallReceipt> Call(const Problem& problem, Direction direction, const Tensors& in,
                                   const Outputs& out, const CallOptions& options) {
    RETURN_IF_ERROR(Validate(problem));
    RETURN_IF_ERROR(CheckTensors(problem, in, out));
    ASSIGN_OR_RETURN(v1::CallOptions header, Header(options));
    ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
    ASSIGN_OR_RETURN(std::vector<ShardRange> shards, Plan(problem, direction, deadline, options));
    LogicalCall call(problem, std::move(shards), std::move(header), in, out);
    absl::StatusOr<CallReceipt> receipt = CallRunner(core_, call, options, deadline).Run();
    if (!receipt.ok()) limits_.Forget(receipt.status());
    return receipt;
  }

  absl::StatusOr<ServerInfo> GetServerInfo(int address, const CallOptions& options) {
    RETURN_IF_ERROR(CheckAddress(address));
    ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
    v1::GetServerInfoResponse reply;
    RETURN_IF_ERROR(CallUnary(core_, address, "/attnd.v1.Attention/GetServerInfo", "", deadline,
                              options.stop, reply));
    return FromProto(reply, options_.addresses[address]);
  }

  absl::StatusOr<Health> CheckHealth(int address, const CallOptions& options) {
    RETURN_IF_ERROR(CheckAddress(address));
    ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
    return CallHealthCheck(core_, address, deadline, options.stop);
  }

 private:
  absl::Status CheckAddress(int address) const {
    if (address >= 0 && address < connections_->address_count()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "address_index: expected 0..", connections_->address_count() - 1, ", got ", address));
  }

  absl::StatusOr<absl::Time> Deadline(const CallOptions& options) const {
    absl::Duration timeout = options.timeout.value_or(options_.timeout);
    if (timeout <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError("timeout: expected above 0, got none left");
    }
    return clock_->Now() + timeout;
  }

  absl::StatusOr<v1::CallOptions> Header(const CallOptions& options) const {
    if (options.request_id.size() > kMaxRequestIdBytes) {
      return absl::InvalidArgumentError(absl::StrCat("options.request_id: expected at most ",
                                                     kMaxRequestIdBytes, " bytes, got ",
                                                     options.request_id.size()));
    }
    v1::CallOptions header;
    header.set_request_id(options.request_id.empty() ? RandomRequestId() : options.request_id);
    header.set_priority(static_cast<v1::Priority>(options.priority.value_or(options_.priority)));
    return header;
  }

  absl::StatusOr<std::vector<ShardRange>> Plan(const Problem& problem, Direction direction,
                                               absl::Time deadline, const CallOptions& options) {
    MessageSizes whole = MessageSizesOf(problem, direction);
    int64_t larger = std::max(whole.request, whole.reply);
    PlanLimits limits;
    limits.max_message_bytes = options_.max_reply_bytes;
    if (larger > MessageLimits::kAnyServerTakes) {
      limits.max_message_bytes = std::min(
          limits.max_message_bytes, limits_.Smallest([&](int address) -> absl::StatusOr<int64_t> {
            CallOptions probe{.timeout = std::min(deadline - clock_->Now(), absl::Seconds(2)),
                              .stop = options.stop};
            ASSIGN_OR_RETURN(ServerInfo info, GetServerInfo(address, probe));
            return info.max_message_bytes;
          }));
    }
    // Large calls in pieces of shard_bytes, smaller ones over all connections.
    limits.target_bytes = std::min(options_.shard_bytes,
                                   std::max(larger / connections_->count() + 1, kMinShardBytes));
    return PlanShards(problem, direction, limits);
  }

  const ClientOptions options_;
  const std::unique_ptr<Clock> clock_;
  const std::unique_ptr<Connections> connections_;
  RetryBudget budget_;
  MessageLimits limits_;
  CompletionQueues queues_;
  const int max_lanes_;
  LaneThreads lane_threads_;
  const ClientCore core_;
};

absl::StatusOr<std::unique_ptr<AttentionClient>> AttentionClient::Connect(ClientOptions options) {
  auto clock = std::make_unique<RealClock>();
  ASSIGN_OR_RETURN(std::unique_ptr<Connections> connections, Connections::Create(options, *clock));
  return std::unique_ptr<AttentionClient>(new AttentionClient(
      std::make_unique<Impl>(std::move(options), std::move(clock), std::move(connections))));
}

AttentionClient::AttentionClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AttentionClient::~AttentionClient() = default;

absl::StatusOr<CallReceipt> AttentionClient::Forward(const Problem& problem,
                                                     const ForwardTensors& in,
                                                     const ForwardOutputs& out,
                                                     const CallOptions& options) {
  return impl_->Call(problem, Direction::kForward, in, out, options);
}

absl::StatusOr<CallReceipt> AttentionClient::Backward(const Problem& problem,
                                                      const BackwardTensors& in,
                                                      const BackwardOutputs& out,
                                                      const CallOptions& options) {
  return impl_->Call(problem, Direction::kBackward, in, out, options);
}

absl::StatusOr<ServerInfo> AttentionClient::GetServerInfo(int address_index,
                                                          const CallOptions& options) {
  return impl_->GetServerInfo(address_index, options);
}

absl::StatusOr<Health> AttentionClient::CheckHealth(int address_index, const CallOptions& options) {
  return impl_->CheckHealth(address_index, options);
}

const ClientOptions& AttentionClient::options() const { return impl_->options(); }

}  // namespace attnd
