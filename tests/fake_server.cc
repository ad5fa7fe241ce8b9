#include "tests/fake_server.h"

#include <grpcpp/server_builder.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/dropout.h"
#include "base/check.h"
#include "kernels/reference_backend.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status.pb.h"

namespace attnd {
namespace {

template <class To, class Field>
std::vector<To> ToVector(const Field& field) {
  return std::vector<To>(field.begin(), field.end());
}

template <class Field>
BroadcastShape ToShape(const Field& field) {
  return {field[0], field[1], field[2], field[3]};
}

void ReadScores(const v1::Problem& in, Problem& p) {
  if (in.has_scale()) p.scale = in.scale();
  p.softcap = in.softcap();
  if (in.has_bool_mask()) p.bool_mask = BoolMask{ToShape(in.bool_mask().shape())};
  if (in.has_bias()) {
    p.bias = Bias{static_cast<ElementType>(in.bias().element()), ToShape(in.bias().shape()),
                  in.bias().want_gradient()};
  }
  p.alibi_slopes = ToVector<float>(in.alibi().slope());
  p.dropout = {DropoutThreshold(in.dropout().p()), in.dropout().seed(), in.dropout().offset()};
  if (in.denominator().has_zero_rest()) p.denominator = DenominatorKind::kZeroRest;
  if (in.denominator().has_sink()) p.denominator = DenominatorKind::kSink;
  p.sink_logits = ToVector<float>(in.denominator().sink().logit());
  if (in.accumulate() == v1::ACCUMULATE_FLOAT16) p.accumulate = AccumulateType::kFloat16;
  p.allow_nondeterministic = in.allow_nondeterministic();
}

void ReadDiagonal(const v1::Problem& in, Problem& p) {
  p.causal = in.causal();
  if (in.has_window()) {
    p.window_left = in.window().left();
    p.window_right = in.window().right();
  }
  if (in.alignment().top_left()) p.alignment = Alignment::kTopLeft;
  if (in.alignment().bottom_right()) p.alignment = Alignment::kBottomRight;
  if (in.alignment().has_offsets()) p.alignment = Alignment::kOffsets;
  p.offsets = ToVector<int32_t>(in.alignment().offsets().offset());
}

Problem FromProto(const v1::Problem& in) {
  Problem p;
  p.batch = in.batch();
  p.q_heads = in.q_heads();
  p.kv_heads = in.kv_heads();
  p.q_len = in.q_len();
  p.kv_len = in.kv_len();
  p.qk_head_dim = in.qk_head_dim();
  p.v_head_dim = in.v_head_dim();
  p.element = static_cast<ElementType>(in.element());
  p.layout = static_cast<Layout>(in.layout());
  p.kv_lengths = ToVector<int32_t>(in.lengths().kv_len());
  p.cu_seqlens_q = ToVector<int32_t>(in.lengths().cu_seqlens_q());
  p.cu_seqlens_k = ToVector<int32_t>(in.lengths().cu_seqlens_k());
  ReadDiagonal(in, p);
  ReadScores(in, p);
  p.shard = {in.shard().batch_offset(), in.shard().q_head_offset(), in.shard().total_q_heads()};
  return p;
}

void* Resized(std::string* bytes, int64_t size) {
  bytes->assign(static_cast<size_t>(size), '\xee');
  return bytes->data();
}

void FillReceipt(const LaunchReport& report, v1::Receipt& receipt) {
  receipt.set_backend("reference");
  receipt.set_kernel(report.kernel);
  receipt.set_deterministic(report.deterministic);
  v1::Stage* stage = receipt.add_stage();
  stage->set_name("kernel");
  stage->set_nanoseconds(1000);
}

grpc::Status ToGrpc(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

grpc::Status CheckSize(const char* name, const std::string& payload, int64_t expected) {
  if (static_cast<int64_t>(payload.size()) == expected) return grpc::Status::OK;
  return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                      absl::StrCat(name, ": expected ", expected, ", got ", payload.size()));
}

template <class Request>
grpc::Status CheckInputs(const Problem& p, const Request& request) {
  int64_t element = ElementBytes(p.element);
  int64_t mask = p.bool_mask ? p.bool_mask->bytes() : 0;
  int64_t bias = p.bias ? p.bias->shape.elements() * ElementBytes(p.bias->element) : 0;
  for (const grpc::Status& status : {CheckSize("q", request.q(), p.QueryElements() * element),
                                     CheckSize("k", request.k(), p.KeyElements() * element),
                                     CheckSize("v", request.v(), p.ValueElements() * element),
                                     CheckSize("mask_bits", request.mask_bits(), mask),
                                     CheckSize("bias", request.bias(), bias)}) {
    if (!status.ok()) return status;
  }
  return grpc::Status::OK;
}

template <class Call, class Request>
void SetInputs(const Problem& p, const Request& request, Call& call) {
  call.problem = &p;
  call.q = request.q().data();
  call.k = request.k().data();
  call.v = request.v().data();
  call.mask_bits = reinterpret_cast<const uint8_t*>(request.mask_bits().data());
  call.bias = request.bias().data();
}

std::string MetadataOf(grpc::ServerContext& context, const char* key) {
  auto it = context.client_metadata().find(key);
  return it == context.client_metadata().end() ? ""
                                               : std::string(it->second.data(), it->second.size());
}

}  // namespace

class FakeServer::Service final : public v1::Attention::Service {
 public:
  Service(Script script, int64_t max_message_bytes)
      : script_(std::move(script)), max_message_bytes_(max_message_bytes) {}

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* reply) override {
    reply->set_version("fake");
    reply->set_max_message_bytes(static_cast<uint64_t>(max_message_bytes_));
    reply->add_device()->set_backend("reference");
    return grpc::Status::OK;
  }

  grpc::Status Forward(grpc::ServerContext* context, const v1::ForwardRequest* request,
                       v1::ForwardResponse* reply) override {
    Problem p = FromProto(request->problem());
    grpc::Status status = Begin(Direction::kForward, p, *request, *context);
    if (!status.ok()) return status;
    ForwardCall call;
    SetInputs(p, *request, call);
    call.o = Resized(reply->mutable_o(), p.OutputElements() * ElementBytes(p.element));
    std::string lse;
    call.lse = static_cast<float*>(Resized(&lse, p.LseElements() * 4));
    absl::StatusOr<LaunchReport> report = ReferenceBackend().Forward({call});
    if (request->want_lse()) reply->set_lse(lse);
    if (corrupts_) StoreElement(p.element, reply->mutable_o()->data(), 0, 1234);
    FillReceipt(*report, *reply->mutable_receipt());
    return grpc::Status::OK;
  }

  grpc::Status Backward(grpc::ServerContext* context, const v1::BackwardRequest* request,
                        v1::BackwardResponse* reply) override {
    Problem p = FromProto(request->problem());
    grpc::Status status = Begin(Direction::kBackward, p, *request, *context);
    if (!status.ok()) return status;
    BackwardCall call;
    SetInputs(p, *request, call);
    call.o = request->o().data();
    call.lse = reinterpret_cast<const float*>(request->lse().data());
    call.d_o = request->d_o().data();
    if (!request->d_lse().empty()) {
      call.d_lse = reinterpret_cast<const float*>(request->d_lse().data());
    }
    int64_t element = ElementBytes(p.element);
    call.d_q = Resized(reply->mutable_d_q(), p.QueryElements() * element);
    call.d_k = Resized(reply->mutable_d_k(), p.KeyElements() * element);
    call.d_v = Resized(reply->mutable_d_v(), p.ValueElements() * element);
    if (p.bias && p.bias->want_gradient) {
      call.d_bias =
          static_cast<float*>(Resized(reply->mutable_d_bias(), p.bias->shape.elements() * 4));
    }
    if (p.denominator == DenominatorKind::kSink) {
      call.d_sink = static_cast<float*>(Resized(reply->mutable_d_sink(), p.batch * p.q_heads * 4));
    }
    FillReceipt(*ReferenceBackend().Backward({call}), *reply->mutable_receipt());
    if (corrupts_) StoreElement(p.element, reply->mutable_d_q()->data(), 0, 1234);
    return grpc::Status::OK;
  }

  std::vector<SeenCall> calls() {
    absl::MutexLock lock(&mutex_);
    return calls_;
  }
  void SetScript(Script script) {
    absl::MutexLock lock(&mutex_);
    script_ = std::move(script);
  }
  void CorruptReplies() { corrupts_ = true; }

 private:
  template <class Request>
  grpc::Status Begin(Direction direction, const Problem& p, const Request& request,
                     grpc::ServerContext& context) {
    Script script;
    int number;
    {
      absl::MutexLock lock(&mutex_);
      number = static_cast<int>(calls_.size());
      calls_.push_back({direction, p, static_cast<int64_t>(request.ByteSizeLong()),
                        request.options().request_id(), MetadataOf(context, "authorization"),
                        absl::FromChrono(context.deadline()) - absl::Now()});
      script = script_;
    }
    if (script) {
      grpc::Status status = script(number, context);
      if (!status.ok()) return status;
    }
    absl::Status valid = Validate(p);
    if (!valid.ok()) return ToGrpc(valid);
    return CheckInputs(p, request);
  }

  absl::Mutex mutex_;
  Script script_ ABSL_GUARDED_BY(mutex_);
  const int64_t max_message_bytes_;
  std::atomic<bool> corrupts_{false};
  std::vector<SeenCall> calls_ ABSL_GUARDED_BY(mutex_);
};

FakeServer::FakeServer(const std::string& address, Script script, int64_t max_message_bytes)
    : service_(std::make_unique<Service>(std::move(script), max_message_bytes)),
      address_(address),
      max_message_bytes_(max_message_bytes) {
  Start();
}

FakeServer::~FakeServer() { Stop(); }

std::string FakeServer::address() const { return address_; }

void FakeServer::Start() {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address_, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes_));
  builder.RegisterService(service_.get());
  server_ = builder.BuildAndStart();
  CHECK(server_ != nullptr) << "cannot listen on " << address_;
  if (absl::EndsWith(address_, ":0")) address_ = absl::StrCat("127.0.0.1:", port);
}

void FakeServer::Stop() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  server_.reset();
}

std::vector<SeenCall> FakeServer::calls() { return service_->calls(); }
void FakeServer::CorruptReplies() { service_->CorruptReplies(); }
void FakeServer::SetScript(Script script) { service_->SetScript(std::move(script)); }

grpc::Status StatusWithReason(grpc::StatusCode code, const std::string& message,
                              const std::string& reason, absl::Duration retry_delay) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("attnd");
  info.mutable_metadata()->insert({"limit", "7"});
  status.add_details()->PackFrom(info);
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(retry_delay)));
  status.add_details()->PackFrom(retry);
  return grpc::Status(code, message, status.SerializeAsString());
}

}  // namespace attnd
