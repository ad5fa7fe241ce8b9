#include "server/stream_call.h"

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/payload_receiver.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "proto/attnd/v1/chunk_placer.h"
#include "server/call_record.h"
#include "server/chunk_sequence.h"
#include "server/decode.h"
#include "server/decode_chunk.h"
#include "server/early_start.h"
#include "server/encode.h"
#include "server/encode_fields.h"
#include "server/landing.h"
#include "server/status_details.h"

namespace attnd {
namespace {

// Reading: OnReadDone parses a message, fixes where its data go, asks gRPC for the next message,
// and only then copies what `placer_` has not put in its place already. So the reaction to the next
// message may run beside the copy; `holds_` counts the copies, the launches of what has come
// already and the reading itself, and whoever lets go last goes on: the tensors have landed, or the
// call has failed and nobody reads or writes its memory any more. Finishing: once, whoever is
// first: a refusal, the watch, the result. `phase_` decides.
class StreamCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                         public ReplySink,
                         public WatchedStream {
 public:
  StreamCall(const ServiceDeps& deps, grpc::CallbackServerContext& context, Direction direction,
             uint64_t id)
      : record_(deps, context, direction, id), context_(context) {
    deps.stream_watch.Add(*this);
  }

  void Start() {
    absl::Status known = record_.Identify();
    if (!known.ok()) return FinishOnce(known);
    progress().Begin(Now());
    StartRead(&read_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return EndReading(CheckHalfClose());
    absl::StatusOr<Piece> piece = Take();
    if (!piece.ok()) return EndReading(piece.status());
    ++holds_;
    if (piece->to != nullptr) early_->ChunkLands(piece->bytes, sequence_.received_of_last());
    StartRead(&read_);  // from here on another OnReadDone may run
    Land(*piece);
    LetGo();
  }

  void OnResult(absl::StatusOr<Result> result) override {
    if (!result.ok()) return FinishOnce(result.status());
    auto shared = std::make_shared<Result>(*std::move(result));
    if (shared->call().output_bytes() <= kReplyBytesAtOnce) return Send(std::move(*shared));
    record_.deps().reply_threads.Run([this, shared] { Send(std::move(*shared)); });
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
      stop_early_.request_stop();
      record_.deps().metrics.CallCut(MethodOf(record_.direction()), WorkStage::kReceive, reason);
      return Finish(record_.Failed(status));
    }
    absl::MutexLock lock(&mutex_);
    if (phase_ != Phase::kWriting || std::exchange(reply_cut_, true)) return;
    record_.deps().metrics.CallCut(MethodOf(record_.direction()), WorkStage::kSend, reason);
    context_.TryCancel();
  }

  void OnCancel() override {
    cancelled_ = true;
    stop_early_.request_stop();
    record_.Cancel();
  }

  void OnDone() override {
    record_.deps().stream_watch.Remove(*this);
    record_.Close();
    EndUse();
  }

 private:
  // A received message and where its data go; nowhere for a header.
  struct Piece {
    MessageBytes message;
    ByteRange data;
    std::byte* to = nullptr;
    int64_t bytes = 0;  // of the chunk
  };

  enum class Phase { kReading, kComputing, kWriting, kFinished };

  absl::Time Now() const { return record_.deps().clock.Now(); }

  absl::Status CheckHalfClose() {
    if (cancelled_) return record_.Stopped(WorkStage::kReceive);
    if (call_.has_value()) return sequence_.CheckComplete();
    return FieldError(reason::kChunkOrder, "header", "a header before half-close", "none");
  }

  absl::StatusOr<Piece> Take() {
    const int64_t index = received_messages_++;
    int64_t bytes = static_cast<int64_t>(read_.Length());
    record_.Received(bytes);
    progress().Moved(bytes, Now());
    MessageBytes message(read_);
    read_.Clear();
    ASSIGN_OR_RETURN(StreamPart part, ParseStreamMessage(message, record_.direction()));
    if (part.is_header) return TakeHeader(message, part.range);
    if (!call_.has_value()) {
      return FieldError(reason::kChunkOrder, "header", "a header before the first chunk",
                        "a chunk");
    }
    ASSIGN_OR_RETURN(Tensor tensor, sequence_.Take(part.tensor, part.offset, part.range.size));
    largest_chunk_ = std::max(largest_chunk_, part.range.size);
    const absl::optional<int64_t> delivered =
        placer_->DeliveredBytes(index, part.tensor, part.offset, part.range.size);
    if (!delivered.has_value()) {
      return absl::UnavailableError("the connection was lost within a chunk");
    }
    return Piece{std::move(message), ByteRange{part.range.offset, *delivered},
                 call_->staged()[tensor] + static_cast<int64_t>(part.offset), part.range.size};
  }

  absl::StatusOr<Piece> TakeHeader(const MessageBytes& message, ByteRange header) {
    if (call_.has_value()) return FieldError(reason::kChunkOrder, "header", "one header", "two");
    ASSIGN_OR_RETURN(AttentionCall decoded,
                     Decoder::DecodeHeader(message, header, record_.direction()));
    ASSIGN_OR_RETURN(AdmittedCall call, record_.Admit(std::move(decoded), *this, true));
    sequence_ = ChunkSequence(call.call().inputs());
    call_.emplace(std::move(call));
    if (!sequence_.complete()) {
      early_.emplace(
          *call_, sequence_.last(), record_.deps().worker, record_.deps().clock,
          stop_early_.get_token(), [this] { HoldForLaunch(); }, [this] { LetGoOfLaunch(); });
    }
    PlaceChunks(message);
    return Piece{};
  }

  // From here on what comes of chunks goes from the socket to its place.
  void PlaceChunks(const MessageBytes& header) {
    std::vector<ChunkTarget> targets;
    for (const TensorSource& input : call_->call().inputs()) {
      targets.push_back({static_cast<uint64_t>(RequestField(input.tensor)),
                         call_->staged()[input.tensor], input.range.size});
    }
    placer_.emplace([targets = std::move(targets)](const ChunkForm& chunk) {
      return FindTarget(targets, chunk);
    });
    const absl::Span<const uint8_t> first = header.Beginning();
    if (first.size() < PayloadReceiver::kLeastFirstBytes) return;
    placing_ = PlaceMessagesFrom(context_.peer(), first.data(), *placer_);
  }

  void Land(Piece& piece) {
    if (piece.to == nullptr) return;
    copied_ += piece.data.size;
    piece.message.ForEachPiece(piece.data, [&](absl::Span<const uint8_t> bytes) {
      LandPiece(piece.to, bytes, call_->call().input_bytes());
      piece.to += bytes.size();
    });
    piece.message = MessageBytes();
    early_->ChunkLanded();
  }

  void EndReading(absl::Status status) {
    progress().Pause();
    if (early_.has_value()) early_->End();
    if (!status.ok()) stop_early_.request_stop();
    received_ = std::move(status);
    LetGo();
  }

  void LetGo() {
    if (--holds_ > 0) return;
    placing_.reset();
    if (!received_.ok()) {
      call_.reset();  // memory and budget are back before the answer is out
      return FinishOnce(received_);
    }
    if (!Enter(Phase::kComputing, {Phase::kReading})) return call_.reset();  // it has been cut
    record_.Landed(*call_, copied_);
    record_.deps().worker.Submit(*std::exchange(call_, std::nullopt));
    if (cancelled_) record_.Cancel();  // it may have come just before Submit
  }

  // A launch of what has come already is no reaction, so gRPC may have done with the call before it
  // ends.
  void HoldForLaunch() {
    ++uses_;
    ++holds_;
  }
  void LetGoOfLaunch() {
    LetGo();
    EndUse();
  }
  void EndUse() {
    if (--uses_ == 0) delete this;
  }

  void Send(Result result) {
    const ServiceDeps& deps = record_.deps();
    record_.Answered(result);
    // As large as the caller finds right for the way between.
    const int64_t chunk_bytes = std::clamp(largest_chunk_, kChunkBytes, kLargeChunkBytes);
    messages_ = EncodeStream(std::move(result), deps.engine, deps.clock.Now(), chunk_bytes);
    Enter(Phase::kWriting, {Phase::kComputing});
    progress().Begin(Now());
    WriteNext();
  }

  void WriteNext() {
    if (next_ > 0) {
      progress().Moved(static_cast<int64_t>(messages_[next_ - 1].Length()), Now());
      messages_[next_ - 1].Clear();
    }
    grpc::ByteBuffer& message = messages_[next_++];
    record_.Sent(static_cast<int64_t>(message.Length()));
    if (next_ < messages_.size()) return StartWrite(&message);
    // Still kWriting: a peer that never reads the last message is cut too.
    StartWriteAndFinish(&message, grpc::WriteOptions(), grpc::Status::OK);
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

  CallRecord record_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer read_;
  ChunkSequence sequence_;
  std::optional<AdmittedCall> call_;  // from the header until it is submitted
  std::stop_source stop_early_;
  std::optional<EarlyStart> early_;  // from the header on, if payloads come
  int64_t received_messages_ = 0, largest_chunk_ = 0;
  std::optional<ChunkPlacer> placer_;                  // from the header on
  std::unique_ptr<PayloadReceiver::Placing> placing_;  // null: every chunk is copied
  std::atomic<int64_t> copied_{0};
  std::atomic<int> holds_{1};
  std::atomic<int> uses_{1};  // of this object: gRPC's, and each launch's
  absl::Status received_;     // of the reading, once it has ended
  std::atomic<bool> cancelled_{false};
  std::vector<grpc::ByteBuffer> messages_;
  size_t next_ = 0;  // message to write
  absl::Mutex mutex_;
  Phase phase_ ABSL_GUARDED_BY(mutex_) = Phase::kReading;
  bool reply_cut_ ABSL_GUARDED_BY(mutex_) = false;
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
