#include "client/channels/prober.h"

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/async_unary_call.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "client/channels/grpc_time.h"

namespace attnd {
namespace {

// While probes are under way, a further one begins at most so late.
constexpr absl::Duration kProbeTurn = absl::Milliseconds(20);

bool IsAnswer(const grpc::Status& status) {
  return status.error_code() != grpc::StatusCode::UNAVAILABLE &&
         status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED &&
         status.error_code() != grpc::StatusCode::CANCELLED;
}

}  // namespace

// Those under way, on the prober's thread.
class Prober::Probes {
 public:
  ~Probes() {
    for (auto& probe : probes_) probe->context.TryCancel();
    while (!probes_.empty()) Next(absl::InfiniteFuture());
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    queue_.Next(&tag, &ok);  // nothing is left: it ends at once
  }

  bool empty() const { return probes_.empty(); }

  // The request is empty, for the whole server.
  void Start(AddressId address, std::shared_ptr<grpc::Channel> channel, const std::string& token) {
    auto probe = std::make_unique<Probe>();
    probe->address = address;
    probe->channel = std::move(channel);
    probe->context.set_deadline(GrpcTime(SteadyNow() + kPatience));
    if (!token.empty()) probe->context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    grpc::Slice nothing;
    grpc::GenericStub stub(probe->channel);
    probe->reader = stub.PrepareUnaryCall(&probe->context, "/grpc.health.v1.Health/Check",
                                          grpc::ByteBuffer(&nothing, 1), &queue_);
    probe->reader->StartCall();
    probe->reader->Finish(&probe->reply, &probe->status, probe.get());
    probes_.push_back(std::move(probe));
  }

  // The next one to end until then, and whether there was an answer.
  std::optional<std::pair<AddressId, bool>> Next(absl::Time until) {
    void* tag = nullptr;
    bool ok = false;
    const auto event = queue_.AsyncNext(&tag, &ok, GrpcTime(until));
    if (event != grpc::CompletionQueue::GOT_EVENT) return std::nullopt;
    const auto* probe = static_cast<const Probe*>(tag);
    const std::pair<AddressId, bool> found(probe->address, IsAnswer(probe->status));
    std::erase_if(probes_, [&](const auto& one) { return one.get() == probe; });
    return found;
  }

 private:
  struct Probe {
    AddressId address{};
    std::shared_ptr<grpc::Channel> channel;  // shared_ptr: the connection may go meanwhile
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader;
    grpc::ByteBuffer reply;
    grpc::Status status;
  };

  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Probe>> probes_;
};

Prober::Prober(std::string bearer_token, Hooks hooks)
    : bearer_token_(std::move(bearer_token)), hooks_(std::move(hooks)) {}

Prober::~Prober() {
  std::thread thread;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.Signal();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

void Prober::Ask(AddressId address) {
  absl::MutexLock lock(&mutex_);
  due_.try_emplace(address, SteadyNow());
  changed_.Signal();
  if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { Main(); });
}

void Prober::Main() {
  Probes probes;
  while (true) {
    const absl::Time until = probes.empty() ? absl::InfiniteFuture() : absl::InfinitePast();
    for (AddressId address : TakeDue(until)) {
      std::shared_ptr<grpc::Channel> channel = hooks_.channel(address);
      if (channel == nullptr) {
        Ended(address, true);
      } else {
        probes.Start(address, std::move(channel), bearer_token_);
      }
    }
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    if (probes.empty()) continue;
    const auto ended = probes.Next(SteadyNow() + kProbeTurn);
    if (ended.has_value()) Ended(ended->first, ended->second);
  }
}

std::vector<AddressId> Prober::TakeDue(absl::Time until) {
  absl::MutexLock lock(&mutex_);
  auto next = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    absl::Time first = absl::InfiniteFuture();
    for (const auto& [address, due] : due_) first = std::min(first, due);
    return first;
  };
  while (!stopping_ && next() > SteadyNow() &&
         changed_.WaitUntil(mutex_, std::min(next(), until))) {
  }
  std::vector<AddressId> found;
  for (auto& [address, due] : due_) {
    if (due > SteadyNow()) continue;
    due = absl::InfiniteFuture();
    found.push_back(address);
  }
  return found;
}

void Prober::Ended(AddressId address, bool answers) {
  {
    absl::MutexLock lock(&mutex_);
    if (answers) {
      due_.erase(address);
    } else {
      due_[address] = SteadyNow() + kAgain;
    }
  }
  hooks_.verdict(address, answers);
}

}  // namespace attnd
