#include "server/modules/call_stream.h"

#include "absl/strings/match.h"
#include "server/call/status_details.h"
#include "server/rpc/server_context.h"

namespace attnd {
CallStream::CallStream(const StreamDeps& deps, grpc::CallbackServerContext& context)
    : WatchedCall(deps.clock),
      deps_(deps),
      open_(deps.open_calls),
      context_(context),
      unix_socket_(absl::StartsWith(context.peer(), "unix:")),
      deadline_(DeadlineOf(context)) {
  progress()->CallBegan(deps.clock.Now());
  deps_.call_watch.Add(*this);
}

bool CallStream::Read(grpc::ByteBuffer& message) {
  {
    absl::MutexLock lock(&mutex_);
    if (!read_ok_ || cancelled_ || !cut_.ok()) return false;
    read_done_ = false;
  }
  read_.Clear();
  if (!std::exchange(receiving_, true)) progress()->Begin();
  const Started started = StartReading(&read_);
  const bool streamed = started == Started::kPending;
  if (!streamed) ReadDone(started == Started::kDone);
  {
    absl::MutexLock lock(&mutex_);
    auto moved = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return read_done_ || !cut_.ok(); };
    mutex_.Await(absl::Condition(&moved));
    if (!streamed || !read_done_ || !read_ok_) progress()->Pause();
    if (!read_done_ || !read_ok_) return false;
  }
  message.Swap(&read_);
  const auto bytes = static_cast<int64_t>(message.Length());
  progress()->Moved(bytes);
  deps_.metrics.Received(unix_socket_, bytes);
  received_bytes_ += bytes;
  return true;
}

bool CallStream::Write(grpc::ByteBuffer message) {
  {
    absl::MutexLock lock(&mutex_);
    if (!write_ok_ || cancelled_ || !cut_.ok()) return false;
    write_done_ = false;
  }
  write_.Swap(&message);
  const auto bytes = static_cast<int64_t>(write_.Length());
  if (!std::exchange(sending_, true)) progress()->Begin();
  if (StartWriting(&write_) == Started::kDone) WriteDone(true);
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&write_done_));  // the watch and a cancel end it too
  if (!write_ok_) return false;
  progress()->Moved(bytes);
  deps_.metrics.Sent(unix_socket_, bytes);
  sent_bytes_ += bytes;
  return true;
}

absl::Status CallStream::Broken() const {
  absl::MutexLock lock(&mutex_);
  if (!cut_.ok()) return cut_;
  if (!cancelled_ && write_ok_) return absl::OkStatus();
  if (absl::Now() >= deadline_) {
    return Failure(absl::StatusCode::kDeadlineExceeded, reason::kDeadlineExceededTransfer,
                   "the deadline passed while the call was sent or received");
  }
  return Failure(absl::StatusCode::kCancelled, reason::kCancelled, "cancelled by the caller");
}

void CallStream::Finish(const grpc::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    finishing_ = true;
  }
  progress()->Begin();  // a peer that never reads the last message is cut too
  FinishCall(status);
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
}

void CallStream::Moved(bool* done, bool* ok, bool with) {
  absl::MutexLock lock(&mutex_);
  *done = true;
  *ok = with;
}

void CallStream::Cancelled() {
  {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
  }
  stop_.request_stop();
}

void CallStream::Done() {
  deps_.call_watch.Remove(*this);
  Release();
}

CallStream::Started CallStream::TakeOnce(const grpc::ByteBuffer*& request,
                                         grpc::ByteBuffer* message) {
  if (request == nullptr) return Started::kNothing;
  *message = *request;
  request = nullptr;
  return Started::kDone;
}

CallStream::Started UnaryStream::StartReading(grpc::ByteBuffer* message) {
  return TakeOnce(request_, message);
}

CallStream::Started UnaryStream::StartWriting(grpc::ByteBuffer* message) {
  reply_.Swap(message);
  return Started::kDone;
}

CallStream::Started ReadStream::StartReading(grpc::ByteBuffer* message) {
  StartRead(message);
  return Started::kPending;
}

CallStream::Started ReadStream::StartWriting(grpc::ByteBuffer* message) {
  reply_.Swap(message);
  return Started::kDone;
}

CallStream::Started WriteStream::StartReading(grpc::ByteBuffer* message) {
  return TakeOnce(request_, message);
}

CallStream::Started WriteStream::StartWriting(grpc::ByteBuffer* message) {
  StartWrite(message);
  return Started::kPending;
}

CallStream::Started BidiStream::StartReading(grpc::ByteBuffer* message) {
  StartRead(message);
  return Started::kPending;
}

CallStream::Started BidiStream::StartWriting(grpc::ByteBuffer* message) {
  StartWrite(message);
  return Started::kPending;
}

}  // namespace attnd
