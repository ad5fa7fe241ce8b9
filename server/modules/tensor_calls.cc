// PutTensors and GetTensors of a module. Either copies the tensors beside the module, in memory of
// the caller's share, so that a put counts whole and a get shows one state.
#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "server/call/status_details.h"
#include "server/modules/module_calls.h"
#include "server/modules/module_errors.h"
#include "server/modules/running_digest.h"
#include "server/modules/tensor_copy.h"
#include "server/rpc/chunk_sequence.h"

namespace attnd {
namespace {

using Put = v1::PutTensorsRequest;

constexpr uint32_t kMaxShards = 64;
constexpr int kTensorKinds = static_cast<int>(TensorRole::kMoment2Max) + 1;

// Reads what follows the header of a PutTensors.
class PutReader {
 public:
  PutReader(RegisteredModule& module, ModuleMemory& memory, CallStream& stream,
            v1::PutTensorsHeader header)
      : module_(module), memory_(memory), stream_(stream) {
    header.clear_token();  // another one after a restart
    digest_.Add(DigestOf(header));
  }

  absl::Status ReadAll() {
    for (grpc::ByteBuffer buffer; stream_.Read(buffer);) {
      const MessageBytes message(buffer);
      ASSIGN_OR_RETURN(const MessagePart part, PartOf(message, *Put::descriptor()));
      if (committed_) {
        return FieldError(reason::kChunkOrder, "part", "half-close after commit", "another part");
      }
      RETURN_IF_ERROR(Take(message, part));
    }
    RETURN_IF_ERROR(stream_.Broken());
    if (committed_) return absl::OkStatus();
    return FieldError(reason::kChunkOrder, "commit", "a commit before half-close", "none");
  }

  std::vector<TensorCopy>& tensors() { return tensors_; }
  const v1::PutTensorsCommit& commit() const { return commit_; }
  std::string digest() { return digest_.Final(); }

 private:
  absl::Status Take(const MessageBytes& message, const MessagePart& part) {
    if (part.field == Put::kChunkFieldNumber) return TakeChunk(message, part.range);
    RETURN_IF_ERROR(EndTensor());
    if (part.field == Put::kTensorFieldNumber) return TakeTensor(message, part.range);
    if (part.field != Put::kCommitFieldNumber) {
      return FieldError(reason::kChunkOrder, "header", "one header", "two");
    }
    committed_ = true;
    RETURN_IF_ERROR(ReadPart(stream_, message, part.range, "commit", commit_));
    digest_.Add(DigestOf(commit_));
    return absl::OkStatus();
  }

  absl::Status TakeTensor(const MessageBytes& message, ByteRange range) {
    v1::TensorHeader header;
    RETURN_IF_ERROR(ReadPart(stream_, message, range, "tensor", header));
    ASSIGN_OR_RETURN(TensorCopy tensor, TensorCopy::Make(header, module_, memory_));
    if (!names_.emplace(tensor.entry, tensor.role).second) {
      return FieldError(reason::kBadField, "tensor.name", "each tensor once", header.name());
    }
    digest_.Add(DigestOf(header));
    expected_ = header.digest();
    received_ = 0;
    tensors_.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  absl::Status TakeChunk(const MessageBytes& message, ByteRange range) {
    ASSIGN_OR_RETURN(const ChunkPart chunk, ChunkOf(message, range));
    if (tensors_.empty()) {
      return FieldError(reason::kChunkOrder, "chunk", "a tensor before its chunks", "a chunk");
    }
    TensorCopy& tensor = tensors_.back();
    if (chunk.tensor != 0) {
      return FieldError(reason::kBadField, "chunk.tensor", "0", absl::StrCat(chunk.tensor));
    }
    if (chunk.offset != static_cast<uint64_t>(received_)) {
      return FieldError(reason::kChunkOrder, "chunk.offset", absl::StrCat(received_),
                        absl::StrCat(chunk.offset));
    }
    const int64_t most = std::min(kMaxChunkBytes, tensor.size() - received_);
    if (chunk.data.size < 1 || chunk.data.size > most) {
      return FieldError(reason::kBadField, "chunk.data", absl::StrCat("1..", most, " bytes"),
                        absl::StrCat(chunk.data.size));
    }
    message.ForEachPiece(chunk.data, [&](absl::Span<const uint8_t> bytes) {
      std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(tensor.bytes()) + received_);
      received_ += static_cast<int64_t>(bytes.size());
    });
    return absl::OkStatus();
  }

  // Ends the tensor before, which is whole now, or should be.
  absl::Status EndTensor() {
    if (tensors_.empty()) return absl::OkStatus();
    const TensorCopy& tensor = tensors_.back();
    if (received_ != tensor.size()) {
      return FieldError(reason::kChunkOrder, "chunk", absl::StrCat(tensor.size(), " bytes"),
                        absl::StrCat(received_));
    }
    const std::string digest = tensor.Digest();
    if (!expected_.empty() && expected_ != digest) {
      return FieldError(reason::kDigestMismatch, "tensor.digest", "the SHA-256 of its bytes",
                        "another");
    }
    digest_.Add(digest);
    return absl::OkStatus();
  }

  RegisteredModule& module_;
  ModuleMemory& memory_;
  CallStream& stream_;
  std::vector<TensorCopy> tensors_;
  std::set<std::pair<int64_t, TensorRole>> names_;  // of tensors_
  int64_t received_ = 0;                            // of the last tensor
  std::string expected_;                            // its digest; empty: not told
  bool committed_ = false;
  v1::PutTensorsCommit commit_;
  RunningDigest digest_;
};

// With these put no weight is missing.
absl::Status CheckComplete(const RegisteredModule& module, const std::vector<TensorCopy>& tensors) {
  std::vector<bool> put(module.description().table.entries().size(), false);
  for (const TensorCopy& tensor : tensors) {
    if (tensor.role == TensorRole::kWeight) put[tensor.entry] = true;
  }
  return module.CheckWeights(put);
}

absl::Status PutEach(RegisteredModule::Hold& hold, const std::vector<TensorCopy>& tensors) {
  for (const TensorCopy& tensor : tensors) {
    RETURN_IF_ERROR(hold.instance().Put(tensor.entry, tensor.role, tensor.element,
                                        {tensor.bytes(), static_cast<size_t>(tensor.size())}));
    if (tensor.role == TensorRole::kWeight) hold.WasPut(tensor.entry);
  }
  return absl::OkStatus();
}

// Checks a put that is a micro-batch.
absl::Status CheckGradients(const std::vector<TensorCopy>& tensors,
                            const v1::PutTensorsCommit& commit) {
  for (const TensorCopy& tensor : tensors) {
    if (tensor.role == TensorRole::kGradient) continue;
    return FieldError(reason::kBadField, "tensor.kind", "gradients alone with a micro_batch",
                      "another kind");
  }
  if (!commit.complete() && !commit.has_optimizer_step()) return absl::OkStatus();
  return FieldError(reason::kBadField, "commit", "an empty one with a micro_batch", "another");
}

absl::Status CheckCommit(const v1::PutTensorsCommit& commit) {
  constexpr uint64_t kMost = uint64_t{1} << 53;  // exact in float64
  if (commit.optimizer_step() <= kMost) return absl::OkStatus();
  return FieldError(reason::kBadField, "commit.optimizer_step", absl::StrCat("0..", kMost),
                    absl::StrCat(commit.optimizer_step()));
}

}  // namespace

struct ModuleCalls::SentTensors {
  v1::PutTensorsHeader header;
  Module module;
  std::vector<TensorCopy> tensors;
  v1::PutTensorsCommit commit;
  std::string digest;  // of all that was sent
};

absl::Status ModuleCalls::PutTensors(ModuleCall& call) {
  SentTensors sent;
  RETURN_IF_ERROR(ReadHeader(call.stream, *Put::descriptor(), sent.header));
  const bool is_gradient = sent.header.has_micro_batch();
  RETURN_IF_ERROR(is_gradient ? CheckServes(sent.header.token(), call.caller) : CheckNotDraining());
  ASSIGN_OR_RETURN(sent.module, deps_.table.Find(sent.header.token(), call.caller));
  if (is_gradient) {
    RETURN_IF_ERROR(sent.module->CheckSequence(sent.header.sequence()));
    RETURN_IF_ERROR(sent.module->CheckMicroBatch(sent.header.micro_batch()));
  } else {
    RETURN_IF_ERROR(sent.module->CheckChange(sent.header.sequence()));
  }
  PutReader reader(*sent.module, deps_.table.memory(), call.stream, sent.header);
  RETURN_IF_ERROR(reader.ReadAll());
  sent.tensors = std::move(reader.tensors());
  sent.commit = reader.commit();
  sent.digest = reader.digest();
  call.times.landed = SteadyNow();
  v1::PutTensorsResponse response;
  ASSIGN_OR_RETURN(const bool is_new,
                   is_gradient ? ReplaceGradients(call, sent) : ChangeState(call, sent));
  response.set_replayed(!is_new);
  *response.mutable_status() = sent.module->Status();
  return Reply(call.stream, response);
}

absl::StatusOr<bool> ModuleCalls::ReplaceGradients(ModuleCall& call, SentTensors& sent) {
  RETURN_IF_ERROR(CheckGradients(sent.tensors, sent.commit));
  ASSIGN_OR_RETURN(RegisteredModule::MicroBatchTurn turn,
                   sent.module->TakeMicroBatch(
                       sent.header.sequence(), sent.header.micro_batch(),
                       [&] { return sent.digest; }, call.wait));
  if (turn.added) return false;
  ASSIGN_OR_RETURN(const auto turns, TakeDevices(call, *sent.module));
  absl::Status put = PutEach(turn.hold, sent.tensors);
  call.times.computed = SteadyNow();
  if (!put.ok()) {
    turn.hold.Fail();
    return Classified(std::move(put));
  }
  turn.hold.Added(std::move(sent.digest));
  return true;
}

absl::StatusOr<bool> ModuleCalls::ChangeState(ModuleCall& call, SentTensors& sent) {
  RETURN_IF_ERROR(CheckCommit(sent.commit));
  ASSIGN_OR_RETURN(RegisteredModule::ChangeTurn change,
                   sent.module->TakeChange(sent.header.sequence(), sent.digest, call.wait));
  if (!change.hold.has_value()) return false;
  RegisteredModule::Hold& hold = *change.hold;
  if (sent.commit.complete()) RETURN_IF_ERROR(CheckComplete(*sent.module, sent.tensors));
  ASSIGN_OR_RETURN(const auto turns, TakeDevices(call, *sent.module));
  absl::Status put = hold.instance().ClearGradients();
  if (put.ok()) put = PutEach(hold, sent.tensors);
  call.times.computed = SteadyNow();
  if (!put.ok()) {
    hold.Fail();
    return Classified(std::move(put));
  }
  if (sent.commit.has_optimizer_step()) {
    hold.instance().SetOptimizerStep(static_cast<int64_t>(sent.commit.optimizer_step()));
  }
  hold.Changed(std::move(sent.digest), "");
  hold.Save(deps_.table.clock().Now());
  call.times.saved = SteadyNow();
  return true;
}

namespace {

absl::Status CheckGet(const v1::GetTensorsRequest& request, const WeightTable& table) {
  if (request.shards() > kMaxShards) {
    return FieldError(reason::kBadField, "shards", absl::StrCat("0..", kMaxShards),
                      absl::StrCat(request.shards()));
  }
  if (request.shard() >= std::max(request.shards(), 1u)) {
    return FieldError(reason::kBadField, "shard", "less than shards",
                      absl::StrCat(request.shard()));
  }
  if (request.kind_size() > kTensorKinds) {
    return FieldError(reason::kBadField, "kind", absl::StrCat("at most ", kTensorKinds, " kinds"),
                      absl::StrCat(request.kind_size()));
  }
  for (int n = 0; n < request.name_size(); ++n) {
    if (table.Find(request.name(n)) != nullptr) continue;
    return FieldError(reason::kBadField, absl::StrCat("name[", n, "]"),
                      "the name of one of the module's parameters", request.name(n));
  }
  return absl::OkStatus();
}

// Each once, in the request's order.
absl::StatusOr<std::vector<TensorRole>> RolesOf(const v1::GetTensorsRequest& request) {
  if (request.kind().empty()) return std::vector<TensorRole>{TensorRole::kWeight};
  std::vector<TensorRole> roles;
  for (const int kind : request.kind()) {
    ASSIGN_OR_RETURN(const TensorRole role, DecodeTensorKind(static_cast<v1::TensorKind>(kind)));
    if (!absl::c_linear_search(roles, role)) roles.push_back(role);
  }
  return roles;
}

struct WantedTensor {
  const WeightEntry* entry;
  TensorRole role;
};

// Returns the bytes of the lists that a GetTensors makes before it reserves memory for tensors, at
// most.
int64_t ListBytes(const v1::GetTensorsRequest& request, const WeightTable& table) {
  constexpr size_t kTensorBytes = 2 * (sizeof(WantedTensor) + sizeof(TensorCopy));
  const auto kinds = static_cast<size_t>(std::clamp(request.kind_size(), 1, kTensorKinds));
  return static_cast<int64_t>(2 * request.SpaceUsedLong() +
                              kinds * table.entries().size() * kTensorBytes);
}

// At most the module's own tensors, however long the request is. Tensors go to the shard that has
// the fewest bytes yet, the first of them.
absl::StatusOr<std::vector<WantedTensor>> WantedTensors(const v1::GetTensorsRequest& request,
                                                        const ModuleDescription& module) {
  RETURN_IF_ERROR(CheckGet(request, module.table));
  ASSIGN_OR_RETURN(const std::vector<TensorRole> roles, RolesOf(request));
  const std::set<std::string> names(request.name().begin(), request.name().end());
  std::vector<int64_t> dealt(std::max(request.shards(), 1u), 0);
  std::vector<WantedTensor> wanted;
  for (const TensorRole role : roles) {
    for (const WeightEntry& entry : module.table.entries()) {
      const bool named = names.empty() || names.contains(entry.name);
      if (!named || !HasTensor(module, entry, role)) continue;
      const auto shard = std::min_element(dealt.begin(), dealt.end());
      *shard += entry.elements;
      if (shard - dealt.begin() != static_cast<int64_t>(request.shard())) continue;
      wanted.push_back({&entry, role});
    }
  }
  return wanted;
}

absl::Status SendTensor(CallStream& stream, v1::TensorHeader header, const TensorCopy& tensor) {
  v1::GetTensorsResponse message;
  *message.mutable_tensor() = std::move(header);
  message.mutable_tensor()->set_digest(tensor.Digest());
  RETURN_IF_ERROR(Reply(stream, message));
  for (int64_t at = 0; at < tensor.size(); at += kChunkBytes) {
    const int64_t bytes = std::min(kChunkBytes, tensor.size() - at);
    v1::PayloadChunk& chunk = *message.mutable_chunk();
    chunk.set_offset(static_cast<uint64_t>(at));
    chunk.set_data(tensor.bytes() + at, static_cast<size_t>(bytes));
    RETURN_IF_ERROR(Reply(stream, message));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ModuleCalls::GetTensors(ModuleCall& call) {
  v1::GetTensorsRequest request;
  RETURN_IF_ERROR(ReadRequest(call.stream, request));
  ASSIGN_OR_RETURN(const Module module, deps_.table.Find(request.token(), call.caller));
  const ModuleDescription& description = module->description();
  RETURN_IF_ERROR(call.stream.HoldRequest(ListBytes(request, description.table)));
  ASSIGN_OR_RETURN(const std::vector<WantedTensor> wanted, WantedTensors(request, description));
  std::optional<uint64_t> sequence;
  if (request.has_sequence()) sequence = request.sequence();
  RETURN_IF_ERROR(module->CheckSequence(sequence));
  const auto header_of = [&](const WantedTensor& tensor) {
    return HeaderOf(description, *tensor.entry, tensor.role, request.element());
  };
  std::vector<TensorCopy> tensors;
  for (const WantedTensor& wish : wanted) {
    const v1::TensorHeader header = header_of(wish);
    ASSIGN_OR_RETURN(TensorCopy tensor, TensorCopy::Make(header, *module, deps_.table.memory()));
    tensors.push_back(std::move(tensor));
  }
  v1::GetTensorsResponse first;
  call.times.landed = SteadyNow();
  {
    ASSIGN_OR_RETURN(RegisteredModule::Hold hold, module->Take(sequence, call.wait));
    ASSIGN_OR_RETURN(const auto turns, TakeDevices(call, *module));
    for (TensorCopy& tensor : tensors) {
      absl::Status got = hold.instance().Get(tensor.entry, tensor.role, tensor.element,
                                             {tensor.bytes(), static_cast<size_t>(tensor.size())});
      if (!got.ok()) return Classified(std::move(got));
    }
    call.times.computed = SteadyNow();
    *first.mutable_status() = module->Status();
  }
  RETURN_IF_ERROR(Reply(call.stream, first));
  for (size_t n = 0; n < tensors.size(); ++n) {
    RETURN_IF_ERROR(SendTensor(call.stream, header_of(wanted[n]), tensors[n]));
  }
  return absl::OkStatus();
}

}  // namespace attnd
