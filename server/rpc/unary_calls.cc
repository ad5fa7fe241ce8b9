#include "server/rpc/unary_calls.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/async_unary_call.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "net/spin_wait.h"
#include "server/admission/staging_copy.h"
#include "server/call/status_details.h"
#include "server/rpc/rpc_context.h"
#include "server/wire/decode.h"
#include "server/wire/encode.h"

namespace attnd {
namespace {

// Calls of each method that a queue is ready to take; further ones wait in gRPC for the next.
constexpr int kReadyCalls = 16;

}  // namespace

// A completion queue and the thread that drives it.
class UnaryCalls::Queue {
 public:
  // gRPC hands this back: a reaction of a call.
  struct Tag {
    Call* call;
    void (Call::*react)(bool ok);
  };

  Queue(AttentionService& service, std::unique_ptr<grpc::ServerCompletionQueue> queue)
      : service_(service), queue_(std::move(queue)) {}
  ~Queue();

  void Start();
  // Makes one more call of `direction` that waits to be taken; none once the queue ends.
  void AwaitCall(Direction direction);
  // Counts calls that have arrived.
  void CallBegins();
  void CallEnds();
  void WaitUntilNoneIsLeft();
  AttentionService& service() { return service_; }
  absl::Time stuck_at() const { return watch_.stuck_at(); }

 private:
  void Main();
  bool Next(void** tag, bool* ok);

  AttentionService& service_;
  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  SpinWait waits_;
  WorkWatch watch_;    // the thread's reactions
  absl::Mutex mutex_;  // no call is asked for once the queue has been shut down
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

// One call, from before it arrives until gRPC has done with it. It deletes itself when its three
// holders have let go: the work that ends with Submit or a refusal, the reply's end, and gRPC's
// word that the call is over or cancelled.
class UnaryCalls::Call final : public ReplySink, public WatchedCall {
 public:
  Call(Queue& queue, Direction direction)
      : WatchedCall(queue.service().deps().clock), queue_(queue), direction_(direction) {
    context_.AsyncNotifyWhenDone(&over_);
  }

  void Request(grpc::ServerCompletionQueue& queue) {
    queue_.service().Request(direction_, context_, request_, responder_, queue, &arrived_);
  }

 private:
  const ServiceDeps& deps() const { return queue_.service().deps(); }
  absl::Time Now() const { return deps().clock.Now(); }

  // Not ok: the server stops, and nothing else will come.
  void OnArrived(bool ok) {
    if (!ok) {
      delete this;
      return;
    }
    queue_.CallBegins();
    queue_.AwaitCall(direction_);
    record_.emplace(deps(), context_, direction_, queue_.service().NextId());
    progress()->CallBegan(record_->received_at());
    deps().calls.watch().Add(*this);
    if (request_.Length() <= kBytesAtOnce) return Work();
    deps().calls.transfers().Run([this] { Work(); });
  }

  void Work() {
    record_->Received(static_cast<int64_t>(request_.Length()));
    absl::Status known = record_->Identify();
    if (known.ok()) known = record_->TakeRoom();
    if (!known.ok()) return Take(std::move(known));
    bool takes_long = false;
    absl::StatusOr<AdmittedCall> call = Accept(&takes_long);
    if (!takes_long) return Take(std::move(call));
    const absl::Status taken = deps().calls.mask_workers().Run(record_->caller(), [this] {
      Take(cancelled_ ? record_->Stopped(WorkStage::kReceive) : Accept(nullptr));
    });
    if (!taken.ok()) Take(taken);
  }

  void Take(absl::StatusOr<AdmittedCall> call) {
    if (!call.ok()) {
      const MessageBytes message(request_);
      record_->NoteRefused(message, {0, message.size()});
    }
    request_.Clear();  // gRPC's own reference would keep its slices until the end of the call
    if (call.ok()) {
      deps().worker.Submit(*std::move(call));
      if (cancelled_) record_->Cancel();  // gRPC may have told before Submit
    } else {
      Refuse(call.status());
    }
    LetGo();
  }

  absl::StatusOr<AdmittedCall> Accept(bool* takes_long) {
    ASSIGN_OR_RETURN(
        AttentionCall decoded,
        Decoder::Decode(MessageBytes(request_), direction_, record_->masks(takes_long),
                        [this](int64_t bytes) { return record_->HoldRequest(bytes); }));
    ASSIGN_OR_RETURN(AdmittedCall call, record_->Admit(std::move(decoded), *this, false));
    record_->Landed(call, Land(call));
    return call;
  }

  void OnResult(absl::StatusOr<Result> result) override {
    if (!result.ok()) return Refuse(result.status());
    const int64_t bytes = result->call().output_bytes() - result->call().shared_output_bytes();
    if (bytes <= kBytesAtOnce) return Send(*std::move(result));
    // shared_ptr: std::function wants what it holds to be copyable.
    auto shared = std::make_shared<Result>(*std::move(result));
    deps().calls.transfers().Run([this, shared] { Send(std::move(*shared)); });
  }

  void Send(Result result) {
    record_->Answered(result);
    Reply reply = Encode(std::move(result), deps().engine, Now(), progress());
    record_->Sent(static_cast<int64_t>(reply.bytes.Length()));
    progress()->Begin();
    responder_.Finish(reply.bytes, grpc::Status::OK, &sent_);
  }

  void Refuse(const absl::Status& status) {
    progress()->Begin();
    responder_.FinishWithError(record_->Failed(status), &sent_);
  }

  void OnSent(bool) {
    progress()->Pause();
    LetGo();
  }

  void OnOver(bool) {
    if (context_.IsCancelled()) {
      cancelled_ = true;
      record_->Cancel();
    }
    LetGo();
  }

  // The peer does not read the reply, so it would not read a status either.
  void Cut(const absl::Status& status) override {
    if (!cut_.ok()) return;
    cut_ = status;
    deps().metrics.CallCut(MethodOf(direction_), WorkStage::kSend, ReasonOf(status));
    context_.TryCancel();
  }

  void LetGo() {
    if (--holders_ > 0) return;
    deps().calls.watch().Remove(*this);
    if (!cut_.ok()) record_->Failed(cut_);
    record_->Close();
    Queue& queue = queue_;
    delete this;
    queue.CallEnds();
  }

  Queue& queue_;
  const Direction direction_;
  grpc::ServerContext context_;
  grpc::ByteBuffer request_;
  grpc::ServerAsyncResponseWriter<grpc::ByteBuffer> responder_{&context_};
  Queue::Tag arrived_{this, &Call::OnArrived}, sent_{this, &Call::OnSent},
      over_{this, &Call::OnOver};
  std::optional<RpcContext> record_;  // from its arrival on
  std::atomic<int> holders_{3};
  std::atomic<bool> cancelled_{false};
  absl::Status cut_;  // the watch's, until the call is removed from it
};

void UnaryCalls::Queue::Start() {
  for (int n = 0; n < kReadyCalls; ++n) {
    AwaitCall(Direction::kForward);
    AwaitCall(Direction::kBackward);
  }
  thread_ = std::thread([this] { Main(); });
}

void UnaryCalls::Queue::CallBegins() {
  absl::MutexLock lock(&mutex_);
  ++calls_;
}

void UnaryCalls::Queue::CallEnds() {
  absl::MutexLock lock(&mutex_);
  --calls_;
}

void UnaryCalls::Queue::WaitUntilNoneIsLeft() {
  auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return calls_ == 0; };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&none));
}

// A call must find its queue open when it answers.
UnaryCalls::Queue::~Queue() {
  WaitUntilNoneIsLeft();
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  queue_->Shutdown();
  if (thread_.joinable()) {
    thread_.join();
  } else {
    Main();  // the server never started, but gRPC wants an empty queue
  }
}

void UnaryCalls::Queue::AwaitCall(Direction direction) {
  auto call = std::make_unique<Call>(*this, direction);
  absl::MutexLock lock(&mutex_);
  if (!ending_) call.release()->Request(*queue_);
}

bool UnaryCalls::Queue::Next(void** tag, bool* ok) {
  using Status = grpc::CompletionQueue::NextStatus;
  Status status = Status::TIMEOUT;
  waits_.Wait(
      true,
      [&] {
        status = queue_->AsyncNext(tag, ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
        return status != Status::TIMEOUT;
      },
      [&] {
        status = queue_->AsyncNext(tag, ok, gpr_inf_future(GPR_CLOCK_MONOTONIC));
        return true;
      });
  return status == Status::GOT_EVENT;
}

void UnaryCalls::Queue::Main() {
  void* pointer = nullptr;
  bool ok = false;
  while (Next(&pointer, &ok)) {
    const Tag& tag = *static_cast<Tag*>(pointer);
    const WorkWatch::Work work = watch_.Begin(service_.deps().clock.Now());
    (tag.call->*tag.react)(ok);
  }
}

UnaryCalls::UnaryCalls(AttentionService& service, int threads, grpc::ServerBuilder& builder) {
  for (int n = 0; n < threads; ++n) {
    queues_.push_back(std::make_unique<Queue>(service, builder.AddCompletionQueue()));
  }
}

UnaryCalls::~UnaryCalls() = default;

void UnaryCalls::Start() {
  for (const auto& queue : queues_) queue->Start();
}

absl::Time UnaryCalls::stuck_at() const {
  absl::Time first = absl::InfiniteFuture();
  for (const auto& queue : queues_) first = std::min(first, queue->stuck_at());
  return first;
}

void UnaryCalls::Wait() {
  for (const auto& queue : queues_) queue->WaitUntilNoneIsLeft();
}

}  // namespace attnd
