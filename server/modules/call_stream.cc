#include "server/modules/call_stream.h"

#include <google/protobuf/io/coded_stream.h>

#include <utility>

#include "absl/strings/match.h"
#include "base/clock.h"
#include "server/call/status_details.h"
#include "server/rpc/server_context.h"
#include "server/wire/reply_slices.h"

namespace attnd {
namespace {

// A small call's header, chunk and half-close; of a large one no more than a chunk.
constexpr size_t kReadAhead = 4, kReadAheadBytes = 65536;

// The end of a stream of replies.
template <class Reactor>
void FinishStream(Reactor& reactor, grpc::ByteBuffer* last, const grpc::Status& status) {
  if (last == nullptr) return reactor.Finish(status);
  reactor.StartWriteAndFinish(last, {}, status);
}

// Finishes a call with a single reply.
template <class Reactor>
void FinishReply(Reactor& reactor, grpc::ByteBuffer& reply, grpc::ByteBuffer* last,
                 const grpc::Status& status) {
  if (last != nullptr) reply.Swap(last);
  reactor.Finish(status);
}

}  // namespace

CallStream::CallStream(const StreamDeps& deps, grpc::CallbackServerContext& context, CallCost cost,
                       const grpc::ByteBuffer* request)
    : WatchedCall(deps.clock),
      deps_(deps),
      open_(deps.calls.open()),
      room_(deps.calls.call_bytes(), cost),
      context_(context),
      unix_socket_(absl::StartsWith(context.peer(), "unix:")),
      deadline_(DeadlineOf(context)) {
  progress()->CallBegan(deps.clock.Now());
  if (request != nullptr) {
    absl::MutexLock lock(&mutex_);
    arrived_.push_back(*request);
    arrived_bytes_ = request->Length();
    read_all_ = true;
  }
  deps_.calls.watch().Add(*this);
}

void CallStream::Begin(std::function<void()> run_handler) {
  bool has_request = false;
  {
    absl::MutexLock lock(&mutex_);
    has_request = read_all_;
    run_handler_ = std::move(run_handler);
  }
  if (has_request) return RunHandler();
  progress()->Begin();
  ReadAhead();
}

absl::Status CallStream::Enter(FairShares::Share place, const FairShares::Holder& holder) {
  place_ = std::move(place);
  return room_.Take(holder);
}

void CallStream::RunHandler() {
  std::function<void()> run;
  {
    absl::MutexLock lock(&mutex_);
    run = std::exchange(run_handler_, nullptr);
  }
  if (run != nullptr) run();
}

void CallStream::ReadAhead() {
  {
    absl::MutexLock lock(&mutex_);
    if (reading_ || read_all_ || finishing_) return;
    if (arrived_.size() >= kReadAhead || arrived_bytes_ >= kReadAheadBytes) return;
    reading_ = true;
    ++starting_reads_;
  }
  read_.Clear();
  StartReading(&read_);
  absl::MutexLock lock(&mutex_);
  --starting_reads_;
}

bool CallStream::Read(grpc::ByteBuffer& message) {
  ReadAhead();
  {
    absl::MutexLock lock(&mutex_);
    auto moved = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return !arrived_.empty() || read_all_ || !cut_.ok();
    };
    mutex_.Await(absl::Condition(&moved));
    const bool has_message = !arrived_.empty() && !cancelled_ && cut_.ok();
    if (!has_message || read_all_) progress()->Pause();
    if (!has_message) return false;
    message.Swap(&arrived_.front());
    arrived_.pop_front();
    if (grpc::ByteBuffer others = TakeOthers(message); others.Length() > 0) {
      arrived_.emplace_front().Swap(&others);
    }
    arrived_bytes_ -= message.Length();
  }
  const auto bytes = static_cast<int64_t>(message.Length());
  progress()->Moved(bytes);
  deps_.metrics.Received(unix_socket_, bytes);
  received_bytes_ += bytes;
  return true;
}

bool CallStream::Write(grpc::ByteBuffer message) {
  {
    absl::MutexLock lock(&mutex_);
    if (IsBroken()) return false;
  }
  const auto bytes = static_cast<int64_t>(message.Length());
  no_room_ = room_.HoldReply(bytes);
  if (!no_room_.ok() || !WriteHeld()) return false;
  holds_message_ = true;
  write_ = WithProgress(message, progress());
  deps_.metrics.Sent(unix_socket_, bytes);
  sent_bytes_ += bytes;
  return true;
}

bool CallStream::WriteHeld() {
  if (!std::exchange(holds_message_, false)) return true;
  {
    absl::MutexLock lock(&mutex_);
    if (IsBroken()) return false;
    write_done_ = false;
  }
  if (!std::exchange(sending_, true)) progress()->Begin();
  StartWriting(&write_);
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&write_done_));  // the watch and a cancel end it too
  return write_ok_;
}

bool CallStream::Flush() {
  const bool written = WriteHeld();
  sending_ = false;
  return written;
}

void CallStream::Shared(int64_t received_bytes, int64_t sent_bytes) {
  deps_.metrics.SharedReceived(received_bytes);
  deps_.metrics.SharedSent(sent_bytes);
  received_bytes_ += received_bytes;
  sent_bytes_ += sent_bytes;
}

absl::Status CallStream::Broken() const {
  if (!no_room_.ok()) return no_room_;
  absl::MutexLock lock(&mutex_);
  if (!cut_.ok()) return cut_;
  if (!cancelled_ && write_ok_) return absl::OkStatus();
  if (SteadyNow() >= deadline_) {
    return Failure(absl::StatusCode::kDeadlineExceeded, reason::kDeadlineExceededTransfer,
                   "the deadline passed while the call was sent or received");
  }
  return Failure(absl::StatusCode::kCancelled, reason::kCancelled, "cancelled by the caller");
}

void CallStream::Finish(const grpc::Status& status) {
  const bool with_message = holds_message_ && status.ok();
  {
    absl::MutexLock lock(&mutex_);
    finishing_ = true;
    auto started = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return starting_reads_ == 0; };
    mutex_.Await(absl::Condition(&started));
  }
  progress()->Begin();  // a peer that never reads the last message is cut too
  FinishCall(with_message ? &write_ : nullptr, status);
  Release();
}

// A reply that is not read cannot be finished with a status either.
void CallStream::Cut(const absl::Status& status) {
  bool writing = false;
  {
    absl::MutexLock lock(&mutex_);
    if (!cut_.ok()) return;
    cut_ = status;
    writing = finishing_ || !write_done_;
  }
  stop_.request_stop();
  if (writing) context_.TryCancel();
  RunHandler();  // it tells the peer
}

void CallStream::ReadDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    if (ok) {
      arrived_bytes_ += read_.Length();
      arrived_.emplace_back().Swap(&read_);
    } else {
      read_all_ = true;
    }
  }
  ReadAhead();
  RunHandler();
}

void CallStream::WriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  write_done_ = true;
  write_ok_ = ok;
}

void CallStream::Cancelled() {
  {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
  }
  stop_.request_stop();
}

void CallStream::Done() {
  deps_.calls.watch().Remove(*this);
  Release();
}

void UnaryStream::FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) {
  FinishReply<grpc::ServerUnaryReactor>(*this, reply_, last, status);
}

// A message whose first part has no bounds stays whole: its reader refuses it.
grpc::ByteBuffer WholeStream::TakeOthers(grpc::ByteBuffer& message) const {
  grpc::Slice all;
  if (!message.DumpToSingleSlice(&all).ok()) return {};
  google::protobuf::io::CodedInputStream in(all.begin(), static_cast<int>(all.size()));
  uint32_t tag, bytes;
  if (!in.ReadVarint32(&tag) || !in.ReadVarint32(&bytes)) return {};
  const size_t end = static_cast<size_t>(in.CurrentPosition()) + bytes;
  if (end >= all.size()) return {};
  const grpc::Slice first = all.sub(0, end), others = all.sub(end, all.size());
  message = grpc::ByteBuffer(&first, 1);
  return grpc::ByteBuffer(&others, 1);
}

void WholeStream::StartWriting(grpc::ByteBuffer* message) {
  std::vector<grpc::Slice> slices;
  const bool ok = message->Dump(&slices).ok();
  written_.insert(written_.end(), slices.begin(), slices.end());
  WriteDone(ok);
}

void WholeStream::FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) {
  if (last != nullptr) StartWriting(last);
  grpc::ByteBuffer all(written_.data(), written_.size());
  FinishReply<grpc::ServerUnaryReactor>(*this, reply_, last == nullptr ? nullptr : &all, status);
}

void ReadStream::FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) {
  FinishReply<grpc::ServerReadReactor<grpc::ByteBuffer>>(*this, reply_, last, status);
}

void WriteStream::FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) {
  FinishStream<grpc::ServerWriteReactor<grpc::ByteBuffer>>(*this, last, status);
}

void BidiStream::FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) {
  FinishStream<grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>>(*this, last, status);
}

}  // namespace attnd
