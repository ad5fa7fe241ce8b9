#include "client/modules/carry_streams.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "client/call/poll_hook.h"
#include "client/call/stream_reply.h"
#include "client/channels/grpc_status.h"
#include "proto/attnd/v1/chunk_framing.h"

namespace attnd {
namespace {

// A stream that moves less costs more than it gains.
constexpr int64_t kLeastBytes = 2 * kChunkBytes;

CallOptions WithStop(CallOptions options, std::stop_token stop) {
  options.stop = std::move(stop);
  return options;
}

CallOptions WithoutHook(CallOptions options) {
  options.poll_hook = nullptr;
  return options;
}

}  // namespace

int CarryStreamCount(const ClientCore& core, int most, int64_t sent_bytes, int64_t received_bytes) {
  const int64_t worth = std::max(sent_bytes, received_bytes) / kLeastBytes - 1;
  const int connections = std::min(core.options.channels_per_address, core.max_workers) - 1;
  return static_cast<int>(std::clamp<int64_t>(worth, 0, std::min(most, connections)));
}

CarryStreams::CarryStreams(const Call& call, int count)
    : call_(call),
      poll_hook_(call.options.poll_hook),
      stopped_(call.options.stop,
               [this] {
                 stop_.request_stop();
                 own_stop_.request_stop();
               }),
      own_options_(WithStop(call.options, own_stop_.get_token())),
      options_(WithoutHook(WithStop(call.options, stop_.get_token()))) {
  for (int n = 0; n < count; ++n) {
    call_.core.carriers.Run([this, gate = gate_] {
      if (!gate->Enter()) return;
      Run();
      gate->Leave();
    });
  }
}

CarryStreams::~CarryStreams() { EndAll(); }

void CarryStreams::EndAll() {
  stop_.request_stop();
  gate_->CloseAndWait(poll_hook_);
}

bool CarryStreams::IsOver() const {
  if (!failed_.ok() || running_ == 0) return true;
  return admitted_ == 0 && call_.landings.CheckComplete().ok();
}

absl::Status CarryStreams::Finish(const absl::Status& own) {
  auto over = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return IsOver(); };
  for (bool done = !own.ok(); !done; poll_hook_.Poll()) {
    absl::MutexLock lock(&mutex_);
    // A stream whose end is slow to come is not worth a wait.
    done = mutex_.AwaitWithTimeout(absl::Condition(&over), PollHook::kInterval) ||
           call_.landings.CheckComplete().ok();
  }
  EndAll();
  const absl::Status complete = call_.landings.CheckComplete();
  if (own.ok() && complete.ok()) return own;
  absl::MutexLock lock(&mutex_);
  if (!failed_.ok()) return failed_;
  return own.ok() ? complete : own;
}

void CarryStreams::Run() {
  bool has_begun = false, is_admitted = false, has_brought_all = false;
  StreamReply reply(call_.landings, [&](const std::string&) {
    is_admitted = true;
    absl::MutexLock lock(&mutex_);
    ++admitted_;
    return absl::OkStatus();
  });
  auto next = [&](bool& last) -> std::optional<grpc::ByteBuffer> {
    if (!std::exchange(has_begun, true)) return HeaderMessage(call_.header);
    if (!is_admitted) return std::nullopt;
    std::optional<grpc::ByteBuffer> chunk = call_.chunks.Next();
    has_brought_all = last = call_.chunks.empty();
    return chunk;
  };
  auto take = [&](grpc::ByteBuffer& message) { return reply.Take(message); };
  {
    absl::MutexLock lock(&mutex_);
    ++running_;
  }
  Pushback pushback;
  const absl::Status status =
      RunStream(call_.core, call_.address, "/attnd.v1.Modules/Carry", call_.metadata, call_.bytes,
                {.next = next, .take = take}, call_.deadline, options_, pushback);
  const bool has_failed = !status.ok() && is_admitted && !stop_.stop_requested();
  {
    absl::MutexLock lock(&mutex_);
    --running_;
    if (is_admitted) --admitted_;
    if (has_failed && failed_.ok()) failed_ = status;
  }
  if (has_failed && !has_brought_all) own_stop_.request_stop();
}

}  // namespace attnd
