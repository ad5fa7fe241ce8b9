#include "client/attention_client.h"

#include <grpc/grpc.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "attention/masks/mask_description.h"
#include "base/cpu_quota.h"
#include "base/status_macros.h"
#include "client/call/call_runner.h"
#include "client/call/known_masks.h"
#include "client/call/lease_book.h"
#include "client/call/logical_call.h"
#include "client/call/message_limits.h"
#include "client/call/residual_state.h"
#include "client/call/shared_memory.h"
#include "client/call/unary_call.h"
#include "client/channels/connections.h"
#include "client/channels/grpc_status.h"
#include "client/shards/shard_plan.h"
#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "proto/attnd/v1/problem_codec.h"

namespace attnd {
namespace {

// A shard smaller than this gains less by another connection than its own overhead costs.
constexpr int64_t kMinShardBytes = int64_t{1} << 20;
constexpr size_t kMaxRequestIdBytes = 64;
// For all addresses' limits at once, after which one may be suspected (Picker::kSilence). A
// server that is there answers in milliseconds.
constexpr absl::Duration kLimitsTimeout = absl::Milliseconds(1550);
// A call about leases takes at most this; the last ones are made while the client goes away.
constexpr absl::Duration kSmallCallTimeout = absl::Milliseconds(500);
constexpr int64_t kChunkOverhead = 64;     // of a chunk's message beside its data
constexpr int64_t kHeaderOverhead = 4096;  // of a call's first message beside its problem

// On 16 cores 6 move as much as 8 with less processor time, 4 and 12 less.
int BulkThreads() { return std::clamp(AvailableCpus() * 3 / 8, 2, 8); }

// gRPC's shutdown joins a thread that may wait ten seconds for a socket, so that a program which
// ends its last client would stand still for as long: gRPC stays until the process ends.
void KeepGrpcRunning() {
  [[maybe_unused]] static const bool kept = [] {
    grpc_init();
    return true;
  }();
}

std::string RandomRequestId() {
  thread_local absl::BitGen random;
  return absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16),
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

// Checks the mask for a server that takes no lists outside of it: it lies in the first message
// whole.
absl::Status CheckMaskSize(const Problem& problem, int64_t most) {
  if (problem.mask == nullptr || problem.mask->bytes() <= most) return absl::OkStatus();
  const auto bytes = static_cast<int64_t>(EncodeProblem(problem).ByteSizeLong());
  if (bytes <= most) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat("problem.mask: expected at most ", most,
                   " bytes, as the server's largest message allows, got ", bytes,
                   ": raise its limit (attnd --max_message_mib), or send bool_mask, which is cut"));
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

absl::StatusOr<MaskReport> FromProto(const v1::CompileMaskResponse& reply) {
  MaskReport report;
  if (reply.id().size() != report.id.size()) {
    return absl::DataLossError(
        absl::StrCat("reply.id: expected ", report.id.size(), " bytes, got ", reply.id().size()));
  }
  absl::c_copy(reply.id(), report.id.begin());
  report.bytes_held = static_cast<int64_t>(reply.bytes_held());
  report.visible = static_cast<int64_t>(reply.visible());
  report.empty_rows = static_cast<int64_t>(reply.empty_rows());
  for (const v1::MaskOnDevice& d : reply.device()) {
    report.devices.push_back(
        {.device = d.device(),
         .kernel_forward = d.kernel_forward(),
         .kernel_backward = d.kernel_backward(),
         .reason = d.reason(),
         .tile_rows = d.tile_rows(),
         .tile_keys = d.tile_keys(),
         .tiles = static_cast<int64_t>(d.tiles()),
         .tiles_full = static_cast<int64_t>(d.tiles_full()),
         .tiles_partial = static_cast<int64_t>(d.tiles_partial()),
         .distinct_bitmaps = static_cast<int64_t>(d.distinct_bitmaps()),
         .plan_bytes = static_cast<int64_t>(d.plan_bytes()),
         .compile_nanoseconds = static_cast<int64_t>(d.compile_nanoseconds())});
  }
  return report;
}

// A map is an average over all of a call, so the call must not be cut.
absl::Status CheckCapture(const CaptureOptions& capture, absl::Span<const ShardRange> shards) {
  if (capture.block < 1 || capture.block > UINT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("capture.block: expected 1 or more, got ", capture.block));
  }
  if (shards.size() == 1) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat("capture: expected a call that fits in one message, since this server takes no "
                   "streams, got ",
                   shards.size(), " pieces"));
}

// A region belongs to one daemon, so several replicas share none.
std::unique_ptr<SharedMemory> MakeSharedMemory(const ClientOptions& options) {
  absl::string_view path = options.addresses.front();
  if (options.addresses.size() != 1 || options.shared_memory_bytes == 0 ||
      !absl::ConsumePrefix(&path, "unix:")) {
    return nullptr;
  }
  absl::ConsumePrefix(&path, "//");
  std::string authorization;
  if (!options.bearer_token.empty()) {
    authorization = absl::StrCat("Bearer ", options.bearer_token);
  }
  return std::make_unique<SharedMemory>(std::string(path), std::move(authorization),
                                        options.shared_memory_bytes);
}

// Threads of calls of modules, three of which at a time have all the streams that they may.
constexpr int kMaxCarriers = 24;

// Two RPCs in flight keep a connection busy while one is encoded or landed; more gained nothing.
// Within a host two for each worker do: where there are fewer of these than connections, cores are
// few, and they bind. Over a network the round trip does.
int InFlightPerWorker(const Connections& connections, int workers) {
  constexpr int kPerConnection = 2;
  if (connections.on_this_host()) return kPerConnection;
  return (kPerConnection * connections.count() + workers - 1) / workers;
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
        bulk_queue_(BulkThreads()),
        max_workers_(std::min(connections_->count(), std::max(2, AvailableCpus()))),
        workers_(max_workers_),
        carriers_(kMaxCarriers),
        shared_memory_(MakeSharedMemory(options_)),
        core_{options_,      *clock_,
              *connections_, budget_,
              queues_,       bulk_queue_,
              workers_,      carriers_,
              max_workers_,  InFlightPerWorker(*connections_, max_workers_),
              counters_,     shared_memory_.get()},
        book_(std::make_shared<LeaseBook>(
            LeaseBook::Calls{
                .renew = [this](int address,
                                const std::string& token) { return Renew(address, token); },
                .release =
                    [this](int address, const std::vector<std::string>& tokens) {
                      Release(address, tokens);
                    }},
            *clock_)) {}

  const ClientOptions& options() const { return options_; }
  const ClientCore& core() const { return core_; }

  ~Impl() { book_->Close(); }

  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes) {
    if (bytes < 0) {
      return absl::InvalidArgumentError(absl::StrCat("bytes: expected 0 or more, got ", bytes));
    }
    std::shared_ptr<std::byte> memory;
    if (shared_memory_ != nullptr) memory = shared_memory_->Allocate(bytes);
    if (memory != nullptr) return memory;
    constexpr int64_t kUnit = SharedMemory::kAlignment;
    size_t size = static_cast<size_t>((bytes / kUnit + 1) * kUnit);
    memory.reset(static_cast<std::byte*>(std::aligned_alloc(kUnit, size)), std::free);
    if (memory != nullptr) return memory;
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes"));
  }

  absl::StatusOr<CallReceipt> Forward(const Problem& problem, const ForwardTensors& in,
                                      const ForwardOutputs& out, const CallOptions& options,
                                      Residual* keep) {
    if (keep != nullptr) *keep = Residual();
    ASSIGN_OR_RETURN(Prepared prepared, Prepare(problem, in, out, options));
    // A backward that is cut alike uses what is kept.
    Direction cut = keep == nullptr ? Direction::kForward : Direction::kBackward;
    ASSIGN_OR_RETURN(Sending sending, SendingOf(problem, cut, prepared.deadline, options));
    if (keep != nullptr) {
      sending.plan.merge = false;  // servers know a kept shard by its entries and heads
      // A forward's request travels, and later a reply as large, not a backward's request.
      sending.plan.target_bytes =
          static_cast<int64_t>(static_cast<double>(sending.plan.target_bytes) *
                               MessageSizesOf(problem, Direction::kBackward).request /
                               MessageSizesOf(problem, Direction::kForward).request);
    }
    if (keep == nullptr || (shared_memory_ != nullptr && shared_memory_->takes_kept_outputs())) {
      LeaveWholeIfShared({in.q, in.k, in.v, out.o}, sending);
    }
    if (options.capture.has_value()) {
      sending.plan.target_bytes = INT64_MAX;
      sending.plan.devices = 1;
    }
    ASSIGN_OR_RETURN(std::vector<ShardRange> shards, PlanShards(problem, cut, sending.plan));
    if (options.capture.has_value()) RETURN_IF_ERROR(CheckCapture(*options.capture, shards));
    LogicalCall call(problem, shards, std::move(prepared.header), in, out);
    if (options.capture.has_value()) call.Capture(*options.capture);
    if (keep != nullptr) call.Keep(options_.residual_ttl);
    call.NameMasks(known_masks_, sending.lists_outside);
    absl::StatusOr<CallReceipt> receipt = Run(call, options, prepared.deadline, sending.streams);
    if (receipt.ok()) receipt->captured = call.TakeCaptured();
    if (keep == nullptr) return receipt;
    std::unique_ptr<ResidualState> state = Book(problem, std::move(shards), call.TakeKept());
    if (!receipt.ok() || state == nullptr) return receipt;
    receipt->leased = std::count_if(state->leases.begin(), state->leases.end(),
                                    [](LeaseBook::Id id) { return id != 0; });
    *keep = Residual(std::move(state));
    return receipt;
  }

  absl::StatusOr<CallReceipt> Backward(const Problem& problem, const BackwardTensors& in,
                                       const BackwardOutputs& out, const CallOptions& options,
                                       const ResidualState* residual) {
    ASSIGN_OR_RETURN(Prepared prepared, Prepare(problem, in, out, options));
    ASSIGN_OR_RETURN(Sending sending,
                     SendingOf(problem, Direction::kBackward, prepared.deadline, options));
    if (residual != nullptr && Fits(*residual, problem)) {
      LogicalCall call(problem, residual->shards, std::move(prepared.header), in, out);
      call.UseLeases(*residual);
      call.NameMasks(known_masks_, sending.lists_outside);
      return Run(call, options, prepared.deadline, sending.streams);
    }
    LeaveWholeIfShared({in.q, in.k, in.v, in.o, in.d_o, out.d_q, out.d_k, out.d_v}, sending);
    ASSIGN_OR_RETURN(std::vector<ShardRange> shards,
                     PlanShards(problem, Direction::kBackward, sending.plan));
    LogicalCall call(problem, std::move(shards), std::move(prepared.header), in, out);
    call.NameMasks(known_masks_, sending.lists_outside);
    return Run(call, options, prepared.deadline, sending.streams);
  }

  absl::StatusOr<ServerInfo> GetServerInfo(int address, const CallOptions& options) {
    RETURN_IF_ERROR(CheckAddress(address));
    ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
    v1::GetServerInfoResponse reply;
    RETURN_IF_ERROR(CallUnary(core_, address, "/attnd.v1.Attention/GetServerInfo", "", deadline,
                              options, reply));
    return FromProto(reply, connections_->target(address));
  }

  absl::StatusOr<Health> CheckHealth(int address, const CallOptions& options) {
    RETURN_IF_ERROR(CheckAddress(address));
    ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
    return CallHealthCheck(core_, address, deadline, options);
  }

  absl::StatusOr<MaskReport> CompileMask(const Problem& problem, int address,
                                         const CallOptions& options) {
    RETURN_IF_ERROR(Validate(problem));
    if (problem.mask == nullptr) {
      return absl::InvalidArgumentError("problem.mask: expected a mask, got none");
    }
    RETURN_IF_ERROR(CheckAddress(address));
    ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
    v1::CompileMaskRequest request;
    *request.mutable_problem() = EncodeProblem(problem);
    v1::CompileMaskResponse reply;
    RETURN_IF_ERROR(CallUnary(core_, address, "/attnd.v1.Attention/CompileMask",
                              request.SerializeAsString(), deadline, options, reply));
    return FromProto(reply);
  }

  absl::StatusOr<v1::BuildPatternResponse> BuildPattern(v1::BuildPatternRequest request,
                                                        const KeptAttentionMap& kept,
                                                        const CallOptions& options) {
    RETURN_IF_ERROR(CheckAddress(kept.address));
    ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
    request.set_token(kept.token);
    v1::BuildPatternResponse reply;
    RETURN_IF_ERROR(CallUnary(core_, kept.address, "/attnd.v1.Attention/BuildPattern",
                              request.SerializeAsString(), deadline, options, reply));
    return reply;
  }

  absl::Status ReleaseCapture(const KeptAttentionMap& kept, const CallOptions& options) {
    RETURN_IF_ERROR(CheckAddress(kept.address));
    ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
    v1::ReleaseCaptureRequest request;
    request.add_tokens(kept.token);
    v1::ReleaseCaptureResponse reply;
    return CallUnary(core_, kept.address, "/attnd.v1.Attention/ReleaseCapture",
                     request.SerializeAsString(), deadline, options, reply);
  }

 private:
  struct Prepared {
    v1::CallOptions header;
    absl::Time deadline;
  };

  template <class Tensors, class Outputs>
  absl::StatusOr<Prepared> Prepare(const Problem& problem, const Tensors& in, const Outputs& out,
                                   const CallOptions& options) const {
    RETURN_IF_ERROR(Validate(problem));
    RETURN_IF_ERROR(CheckTensors(problem, in, out));
    ASSIGN_OR_RETURN(v1::CallOptions header, Header(options));
    ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
    return Prepared{std::move(header), deadline};
  }

  absl::StatusOr<CallReceipt> Run(LogicalCall& call, const CallOptions& options,
                                  absl::Time deadline, const StreamUse& streams) {
    AskQueues(call, options, deadline);
    absl::StatusOr<CallReceipt> receipt = CallRunner(core_, call, options, deadline, streams).Run();
    if (!receipt.ok()) limits_.Forget(receipt.status());
    return receipt;
  }

  // Asks some servers that may get its shards for their queues, where that is worth it: trailers of
  // the answers tell.
  void AskQueues(const LogicalCall& call, const CallOptions& options, absl::Time deadline) {
    int anywhere = 0;  // shards
    for (int64_t n = 0; n < call.shard_count(); ++n) anywhere += call.LeasedAddress(n) < 0 ? 1 : 0;
    if (anywhere == 0 || call.bound_address() >= 0) return;
    const std::vector<std::shared_ptr<Connection>> asked = connections_->ToAsk(anywhere);
    if (asked.empty()) return;
    const absl::Time begun = clock_->Now();
    const absl::Time until = std::min(deadline, begun + connections_->asking_patience());
    const auto answers =
        CallOverEach(core_, asked, "/attnd.v1.Attention/GetServerInfo", "", until, options);
    connections_->Asked(clock_->Now() - begun);
    for (size_t n = 0; n < asked.size(); ++n) {
      const int address = asked[n]->address_index();
      const absl::Status& status = answers[n].status();
      if (absl::IsDeadlineExceeded(status)) connections_->Suspect(asked[n], absl::InfinitePast());
      if (absl::IsUnavailable(status)) connections_->ReportUnavailable(address, begun);
    }
  }

  // The leases of a forward that has ended, well or not; null when there are none.
  std::unique_ptr<ResidualState> Book(const Problem& problem, std::vector<ShardRange> shards,
                                      std::vector<HeldLease> kept) {
    std::vector<LeaseBook::Id> ids(kept.size(), 0);
    bool any = false;
    for (size_t n = 0; n < kept.size(); ++n) {
      if (kept[n].token.empty()) continue;
      ids[n] = book_->Add(std::move(kept[n]));
      any = true;
    }
    if (!any) return nullptr;
    return std::make_unique<ResidualState>(problem, std::move(shards), std::move(ids), book_);
  }

  // Whether a backward of `problem` may be cut as the residual's forward was.
  bool Fits(const ResidualState& residual, const Problem& problem) const {
    if (residual.book != book_ || !SameForward(residual.problem, problem)) return false;
    bool wants = problem.bias && problem.bias->want_gradient;
    bool wanted = residual.problem.bias && residual.problem.bias->want_gradient;
    return !wants || wanted || residual.shards.size() == 1;
  }

  absl::StatusOr<absl::Duration> Renew(int address, const std::string& token) {
    v1::RenewResidualRequest request;
    request.set_token(token);
    request.set_ttl_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.residual_ttl)));
    v1::RenewResidualResponse reply;
    RETURN_IF_ERROR(CallUnary(core_, address, "/attnd.v1.Attention/RenewResidual",
                              request.SerializeAsString(), clock_->Now() + kSmallCallTimeout, {},
                              reply));
    return options_.residual_ttl;
  }

  // A release that fails is not repeated: the lease ends by its time.
  void Release(int address, const std::vector<std::string>& tokens) {
    v1::ReleaseResidualRequest request;
    for (const std::string& token : tokens) request.add_tokens(token);
    v1::ReleaseResidualResponse reply;
    CallUnary(core_, address, "/attnd.v1.Attention/ReleaseResidual", request.SerializeAsString(),
              clock_->Now() + kSmallCallTimeout, {}, reply)
        .IgnoreError();
  }

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

  // One that does not answer is suspected at once, so that the call need not find out again.
  ServerLimits LimitsOfAll(absl::Time deadline, const CallOptions& options) {
    return limits_.OfAll(connections_->usable_addresses(), [&](const std::vector<int>& addresses) {
      const absl::Time begun = clock_->Now();
      const auto replies = CallEach(core_, addresses, "/attnd.v1.Attention/GetServerInfo", "",
                                    std::min(deadline, begun + kLimitsTimeout), options);
      std::vector<absl::StatusOr<ServerLimits>> answers;
      for (size_t n = 0; n < addresses.size(); ++n) {
        answers.push_back(LimitsIn(replies[n]));
        const absl::Status& status = answers.back().status();
        if (absl::IsDeadlineExceeded(status)) {
          connections_->Suspect(connections_->Of(addresses[n]), begun);
        }
        if (absl::IsUnavailable(status)) connections_->ReportUnavailable(addresses[n], begun);
      }
      return answers;
    });
  }

  static absl::StatusOr<ServerLimits> LimitsIn(const absl::StatusOr<std::string>& reply) {
    RETURN_IF_ERROR(reply.status());
    v1::GetServerInfoResponse info;
    if (!info.ParseFromString(*reply)) return absl::DataLossError("reply: cannot be parsed");
    return ServerLimits{.max_message_bytes = static_cast<int64_t>(info.max_message_bytes()),
                        .streams = absl::c_linear_search(info.feature(), "stream"),
                        .mask_data = absl::c_linear_search(info.feature(), "mask_data"),
                        .devices = std::max(info.device_size(), 1)};
  }

  // With TLS a slow link cannot be told from a silent one before a whole chunk has come.
  int64_t MaxChunkBytes() const {
    const bool plain = !options_.tls.has_value();
    return plain && connections_->on_this_host() ? kLargeChunkBytes : kChunkBytes;
  }

  // How a call is cut, and which of its shards are streamed.
  struct Sending {
    PlanLimits plan;
    StreamUse streams;
    bool lists_outside = false;  // those of a mask too large for any server's message
  };
  absl::StatusOr<Sending> SendingOf(const Problem& problem, Direction direction,
                                    absl::Time deadline, const CallOptions& options) {
    MessageSizes whole = MessageSizesOf(problem, direction);
    int64_t larger = std::max(whole.request, whole.reply);
    Sending sending;
    PlanLimits& plan = sending.plan;
    plan.max_message_bytes = options_.max_reply_bytes;
    plan.merge = options_.merge_partial_results;
    const int64_t mask_bytes = problem.mask == nullptr ? 0 : problem.mask->bytes();
    if (std::max(larger, mask_bytes) > MessageLimits::kAnyServerTakes) {
      ServerLimits server = LimitsOfAll(deadline, options);
      plan.max_message_bytes = std::min(plan.max_message_bytes, server.max_message_bytes);
      sending.lists_outside = server.mask_data && mask_bytes > MessageLimits::kAnyServerTakes;
      if (connections_->on_this_host() && ComputesLong(problem, direction)) {
        plan.devices = server.devices;
      }
      if (server.streams) {
        if (!sending.lists_outside) {
          RETURN_IF_ERROR(CheckMaskSize(problem, server.max_message_bytes - kHeaderOverhead));
        }
        sending.streams = {
            .above_bytes = std::min(options_.stream_above_bytes, plan.max_message_bytes),
            .chunk_bytes = std::min(MaxChunkBytes(), server.max_message_bytes - kChunkOverhead)};
        plan.max_message_bytes = INT64_MAX;
      }
    }
    // Large calls in pieces of shard_bytes, and a tensor of just that size, which has a header, in
    // one; smaller ones over the connections that have nothing else to do. Merged parts are no
    // exception to the same bits each time, so that their number may not depend on that.
    int spread = plan.merge ? connections_->count() : std::max(1, connections_->idle_count());
    plan.target_bytes = std::min(options_.shard_bytes + options_.shard_bytes / 128,
                                 std::max(larger / spread + 1, kMinShardBytes));
    return sending;
  }

  // Where nothing has to be copied there is nothing to cut for: a piece of a tensor may lie in
  // strides, and a whole one lies in one piece. Only with streams, in which it could still be sent.
  void LeaveWholeIfShared(std::initializer_list<const void*> tensors, Sending& sending) const {
    if (shared_memory_ == nullptr || sending.streams.chunk_bytes == 0) return;
    for (const void* tensor : tensors) {
      if (!shared_memory_->Find(tensor, 1).has_value()) return;
    }
    sending.plan.target_bytes = INT64_MAX;
  }

  const ClientOptions options_;
  const std::unique_ptr<Clock> clock_;
  const std::unique_ptr<Connections> connections_;
  RetryBudget budget_;
  MessageLimits limits_;
  CompletionQueues queues_;
  BulkQueue bulk_queue_;
  const int max_workers_;
  TaskQueue workers_, carriers_;
  const std::unique_ptr<SharedMemory> shared_memory_;  // null: no address to share with
  ClientCounters counters_;
  const ClientCore core_;
  KnownMasks known_masks_;
  const std::shared_ptr<LeaseBook> book_;  // each Residual's too; closed before the rest goes
};

absl::StatusOr<std::unique_ptr<AttentionClient>> AttentionClient::Connect(ClientOptions options) {
  auto clock = std::make_unique<RealClock>();
  KeepGrpcRunning();
  ASSIGN_OR_RETURN(std::unique_ptr<Connections> connections, Connections::Create(options, *clock));
  return std::unique_ptr<AttentionClient>(new AttentionClient(
      std::make_unique<Impl>(std::move(options), std::move(clock), std::move(connections))));
}

AttentionClient::AttentionClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AttentionClient::~AttentionClient() = default;

absl::StatusOr<CallReceipt> AttentionClient::Forward(const Problem& problem,
                                                     const ForwardTensors& in,
                                                     const ForwardOutputs& out,
                                                     const CallOptions& options, Residual* keep) {
  return impl_->Forward(problem, in, out, options, keep);
}

absl::StatusOr<CallReceipt> AttentionClient::Backward(const Problem& problem,
                                                      const BackwardTensors& in,
                                                      const BackwardOutputs& out,
                                                      const CallOptions& options,
                                                      const Residual* residual) {
  const ResidualState* state = residual == nullptr ? nullptr : residual->state_.get();
  return impl_->Backward(problem, in, out, options, state);
}

absl::StatusOr<ServerInfo> AttentionClient::GetServerInfo(int address_index,
                                                          const CallOptions& options) {
  return impl_->GetServerInfo(address_index, options);
}

absl::StatusOr<Health> AttentionClient::CheckHealth(int address_index, const CallOptions& options) {
  return impl_->CheckHealth(address_index, options);
}

absl::StatusOr<v1::BuildPatternResponse> AttentionClient::BuildPattern(
    v1::BuildPatternRequest request, const KeptAttentionMap& kept, const CallOptions& options) {
  return impl_->BuildPattern(std::move(request), kept, options);
}

absl::Status AttentionClient::ReleaseCapture(const KeptAttentionMap& kept,
                                             const CallOptions& options) {
  return impl_->ReleaseCapture(kept, options);
}

absl::StatusOr<MaskReport> AttentionClient::CompileMask(const Problem& problem, int address_index,
                                                        const CallOptions& options) {
  return impl_->CompileMask(problem, address_index, options);
}

absl::StatusOr<std::shared_ptr<std::byte>> AttentionClient::Allocate(int64_t bytes) {
  return impl_->Allocate(bytes);
}

const ClientOptions& AttentionClient::options() const { return impl_->options(); }
const ClientCore& AttentionClient::core() const { return impl_->core(); }

}  // namespace attnd
