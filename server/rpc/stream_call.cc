#include "server/rpc/stream_call.h"

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "server/admission/staging_copy.h"
#include "server/call/status_details.h"
#include "server/rpc/chunk_sequence.h"
#include "server/rpc/rpc_context.h"
#include "server/wire/decode.h"
#include "server/wire/decode_chunk.h"
#include "server/wire/decode_tensors.h"
#include "server/wire/encode.h"

namespace attnd {
namespace {

// Reading: OnReadDone parses a message, fixes where its data go, asks gRPC for the next message,
// and only then copies the chunk to its place. So the reaction to the next message may run beside
// the copy. `holds_` counts the copies and the reading itself; the last one to end goes on: the
// tensors have landed, or the call has failed and nothing reads or writes its memory any more. A
// call finishes once, by a refusal, the watch or the result, whichever comes first; `phase_`
// decides.
class StreamCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                         public ReplySink,
                         public WatchedCall {
 public:
  StreamCall(const ServiceDeps& deps, grpc::CallbackServerContext& context, Direction direction,
             uint64_t id)
      : WatchedCall(deps.clock), record_(deps, context, direction, id), context_(context) {
    progress()->CallBegan(record_.received_at());
    deps.calls.watch().Add(*this);
  }

  void Start() {
    absl::Status known = record_.Identify();
    if (!known.ok()) return FinishOnce(known);
    progress()->Begin();
    StartRead(&read_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return EndReading(CheckHalfClose());
    absl::StatusOr<Piece> piece = Take();
    if (!piece.ok()) return EndReading(piece.status());
    if (piece->takes_long) return TakeHeaderLater();
    ++holds_;
    StartRead(&read_);  // from here on another OnReadDone may run
    Land(*piece);
    LetGo();
  }

  void OnResult(absl::StatusOr<Result> result) override {
    if (!result.ok()) return FinishOnce(result.status());
    auto shared = std::make_shared<Result>(*std::move(result));
    if (shared->call().output_bytes() <= kBytesAtOnce) return Send(std::move(*shared));
    record_.deps().calls.transfers().Run([this, shared] { Send(std::move(*shared)); });
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return FinishOnce(record_.Stopped(WorkStage::kSend));
    WriteNext();
  }

  // The watch's. A reply that is not read cannot be finished with a status either. A call that has
  // just stopped waiting for its peer goes on.
  void Cut(const absl::Status& status) override {
    const std::string reason = ReasonOf(status);
    if (Enter(Phase::kFinished, {Phase::kReading})) {
      record_.deps().metrics.CallCut(MethodOf(record_.direction()), WorkStage::kReceive, reason);
      return Finish(record_.Failed(status));
    }
    absl::MutexLock lock(&mutex_);
    if (phase_ != Phase::kWriting || !cut_.ok()) return;
    cut_ = status;
    record_.deps().metrics.CallCut(MethodOf(record_.direction()), WorkStage::kSend, reason);
    context_.TryCancel();
  }

  void OnCancel() override {
    cancelled_ = true;
    record_.Cancel();
  }

  void OnDone() override {
    record_.deps().calls.watch().Remove(*this);  // cut_ does not change from here on
    if (!cut_.ok()) record_.Failed(cut_);
    record_.Close();
    Release();
  }

 private:
  // A received message and where its data go; nowhere for a header.
  struct Piece {
    MessageBytes message;
    ByteRange data;
    std::byte* to = nullptr;
    bool takes_long = false;  // the header is to be decoded where there is time
  };

  // kPreparing: MaskWorkers decode the header; nothing is read, and nobody finishes the call.
  enum class Phase { kReading, kPreparing, kComputing, kWriting, kFinished };

  absl::Time Now() const { return record_.deps().clock.Now(); }

  absl::Status CheckHalfClose() {
    if (cancelled_) return record_.Stopped(WorkStage::kReceive);
    if (call_.has_value() || header_.has_value()) return sequence_.CheckComplete();
    return FieldError(reason::kChunkOrder, "header", "a header before half-close", "none");
  }

  absl::StatusOr<Piece> Take() {
    int64_t bytes = static_cast<int64_t>(read_.Length());
    record_.Received(bytes);
    progress()->Moved(bytes);
    MessageBytes message(read_);
    read_.Clear();
    if (!std::exchange(has_room_, true)) RETURN_IF_ERROR(record_.TakeRoom());
    ASSIGN_OR_RETURN(StreamPart part, ParseStreamMessage(message, record_.direction()));
    if (part.is_header) {
      if (call_.has_value() || header_.has_value()) {
        return FieldError(reason::kChunkOrder, "header", "one header", "two");
      }
      header_ = Piece{std::move(message), part.range};
      bool takes_long = false;
      absl::StatusOr<Piece> header = TakeHeader(&takes_long);
      if (!takes_long) return header;
      return Piece{.takes_long = true};
    }
    if (!call_.has_value() && !header_.has_value()) {
      return FieldError(reason::kChunkOrder, "header", "a header before the first chunk",
                        "a chunk");
    }
    ASSIGN_OR_RETURN(const int tensor, sequence_.Take(part.tensor, part.offset, part.range.size));
    if (header_.has_value()) return TakeMaskData(message, part.range);
    largest_chunk_ = std::max(largest_chunk_, part.range.size);
    return Piece{std::move(message), part.range,
                 call_->staged()[tensor] + static_cast<int64_t>(part.offset)};
  }

  // Decodes header_, which is done with then, unless lists of its mask come first.
  absl::StatusOr<Piece> TakeHeader(bool* takes_long) {
    CallersMasks masks = record_.masks(takes_long);
    masks.streamed = &mask_data_;
    absl::StatusOr<AttentionCall> decoded =
        Decoder::DecodeHeader(header_->message, header_->data, record_.direction(), masks,
                              [this](int64_t bytes) { return record_.HoldRequest(bytes); });
    if (!decoded.ok()) {
      if (const int64_t wanted = std::exchange(mask_data_.wanted, 0); wanted > 0) {
        return AwaitMaskData(wanted);
      }
      record_.NoteRefused(header_->message, header_->data);
      return decoded.status();
    }
    header_.reset();
    mask_room_.reset();
    ASSIGN_OR_RETURN(AdmittedCall call, record_.Admit(*std::move(decoded), *this, true));
    sequence_ = ChunkSequence(call.call().tensors());
    call_.emplace(std::move(call));
    return Piece{};
  }

  absl::StatusOr<Piece> AwaitMaskData(int64_t bytes) {
    ASSIGN_OR_RETURN(mask_room_, record_.deps().keep.mask_arrivals().Take(record_.caller(), bytes));
    const TensorSpec data = MaskDataInput(bytes);
    sequence_ = ChunkSequence(absl::MakeConstSpan(&data, 1));
    return Piece{};
  }

  // Memory grows with what has come, not with what was announced.
  Piece TakeMaskData(const MessageBytes& message, ByteRange data) {
    copied_ += data.size;
    message.ForEachPiece(data, [this](absl::Span<const uint8_t> bytes) {
      mask_data_.bytes.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    });
    return Piece{.takes_long = sequence_.complete()};
  }

  // Reads on when the header has been taken. gRPC keeps a call alive in its own reactions only:
  // here the call holds itself, and the next read begins before the watch may finish the call.
  void TakeHeaderLater() {
    progress()->Pause();
    if (!Enter(Phase::kPreparing, {Phase::kReading})) return EndReading(absl::CancelledError());
    ++lives_;
    const absl::Status accepted = record_.deps().calls.mask_workers().Run(record_.caller(), [this] {
      const absl::StatusOr<Piece> taken =
          cancelled_ ? record_.Stopped(WorkStage::kReceive) : TakeHeader(nullptr);
      if (taken.ok()) {
        ++holds_;
        progress()->Begin();
        StartRead(&read_);
      }
      Enter(Phase::kReading, {Phase::kPreparing});
      taken.ok() ? LetGo() : EndReading(taken.status());
      Release();
    });
    if (accepted.ok()) return;
    Enter(Phase::kReading, {Phase::kPreparing});
    EndReading(accepted);
    Release();
  }

  void Land(Piece& piece) {
    if (piece.to == nullptr) return;
    copied_ += piece.data.size;
    piece.message.ForEachPiece(piece.data, [&](absl::Span<const uint8_t> bytes) {
      LandPiece(piece.to, bytes, call_->call().input_bytes());
      piece.to += bytes.size();
    });
    piece.message = MessageBytes();
  }

  void EndReading(absl::Status status) {
    progress()->Pause();
    received_ = std::move(status);
    LetGo();
  }

  void LetGo() {
    if (--holds_ > 0) return;
    if (!received_.ok()) {
      call_.reset();  // memory and budget are back before the answer is out
      return FinishOnce(received_);
    }
    if (!Enter(Phase::kComputing, {Phase::kReading})) return call_.reset();  // it has been cut
    record_.Landed(*call_, copied_);
    record_.deps().worker.Submit(*std::exchange(call_, std::nullopt));
    if (cancelled_) record_.Cancel();  // it may have come just before Submit
  }

  void Send(Result result) {
    const ServiceDeps& deps = record_.deps();
    record_.Answered(result);
    // As large as the caller finds right for the way between.
    const int64_t chunk_bytes = std::clamp(largest_chunk_, kChunkBytes, kLargeChunkBytes);
    messages_ =
        EncodeStream(std::move(result), deps.engine, deps.clock.Now(), chunk_bytes, progress());
    Enter(Phase::kWriting, {Phase::kComputing});
    progress()->Begin();
    WriteNext();
  }

  void WriteNext() {
    if (next_ > 0) messages_[next_ - 1].Clear();
    grpc::ByteBuffer& message = messages_[next_++];
    record_.Sent(static_cast<int64_t>(message.Length()));
    if (next_ < messages_.size()) return StartWrite(&message);
    // Still kWriting: a peer that never reads the last message is cut too.
    StartWriteAndFinish(&message, grpc::WriteOptions(), grpc::Status::OK);
  }

  void Release() {
    if (--lives_ == 0) delete this;
  }

  // False when the call is in none of the phases `from`.
  bool Enter(Phase phase, std::initializer_list<Phase> from) {
    absl::MutexLock lock(&mutex_);
    if (std::find(from.begin(), from.end(), phase_) == from.end()) return false;
    phase_ = phase;
    return true;
  }
  void FinishOnce(const absl::Status& status) {
    bool first = Enter(Phase::kFinished, {Phase::kReading, Phase::kComputing, Phase::kWriting});
    if (first) Finish(record_.Failed(status));
  }

  RpcContext record_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer read_;
  bool has_room_ = false;  // or it was refused: with the first message
  ChunkSequence sequence_;
  std::optional<Piece> header_;                    // until it has become a call
  StreamedMaskData mask_data_;                     // between the header and the tensors
  std::unique_ptr<MaskArrivals::Room> mask_room_;  // for it
  std::optional<AdmittedCall> call_;               // from the header until it is submitted
  int64_t largest_chunk_ = 0;
  std::atomic<int64_t> copied_{0};
  std::atomic<int> holds_{1};
  std::atomic<int> lives_{1};  // gRPC's, until OnDone, and that of TakeHeaderLater
  absl::Status received_;      // of the reading, once it has ended
  std::atomic<bool> cancelled_{false};
  std::vector<grpc::ByteBuffer> messages_;
  size_t next_ = 0;  // message to write
  absl::Mutex mutex_;
  Phase phase_ ABSL_GUARDED_BY(mutex_) = Phase::kReading;
  absl::Status cut_;  // the watch's, of a reply that is not read
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StartStreamCall(
    const ServiceDeps& deps, grpc::CallbackServerContext& context, Direction direction,
    uint64_t id) {
  auto* call = new StreamCall(deps, context, direction, id);
  call->Start();
  return call;
}

}  // namespace attnd
