// A simulation of a training client and a daemon of modules, by a seed: the client trains over a
// network that drops, doubles, delays and reorders messages; the daemon's disk fails, fills, and
// tears writes; the process dies at any of its calls of the disk, or between two messages, and the
// host loses power with it, and with that what was not synced. Modules, table, ledger, memory and
// states are the real ones. After each message and each death:
//   the weights are those that an undisturbed run has at this sequence: each call counted once
//   no step is lost of which a reply said that it is durable
//   memory, staging memory, places and room have come back, and quotas hold before allocations
// Mistakes that are planted are found. ATTND_TEST_SCHEDULES says how many schedules run,
// ATTND_TEST_SEED which is the first.
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "kernels/reference_backend.h"
#include "modules/known_layers.h"
#include "modules/reference/reference_engine.h"
#include "proto/attnd/v1/module.pb.h"
#include "proto/attnd/v1/module_codec.h"
#include "server/modules/module_calls.h"
#include "server/rpc/calls.h"
#include "server/shared_memory/shared_memory.h"

namespace attnd {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kLastSequence = 5, kMicroBatches = 2;
constexpr int64_t kWidth = 8, kRows = 2;
constexpr int64_t kStagingBytes = 1 << 16;
constexpr int64_t kModuleBytes = 6'000;  // room for three modules, not for four
constexpr int kFaultyTicks = 120, kMostTicks = 4000;

// Mistakes that a daemon could make.
enum class Planted { kNone, kNoFileSync, kNoFolderSync, kAllocationBeforeQuota };

// ---- The disk: of one folder, as it is now and as it may be after a loss of power.

struct Node {
  std::string written;
  size_t synced = 0;  // bytes of it
};
using Listing = std::map<std::string, std::shared_ptr<Node>>;

struct DiskModel {
  Listing now;
  std::vector<Listing> since_sync = {{}};  // the synced one, then those after each change
  bool root_is_synced = false;
};

class SimulatedDisk final : public StateDisk {
 public:
  SimulatedDisk(const std::string& root, Planted planted, Random& random, DiskModel model)
      : root_(NumberOf(root)), planted_(planted), random_(random), model_(std::move(model)) {}

  const DiskModel& model() const { return model_; }
  bool is_dead() const { return is_dead_; }
  void Die() { is_dead_ = true; }
  void DieWithin(int64_t calls) { dies_at_ = calls_ + random_.Between(1, calls); }
  void FailOften(double chance) { fails_ = chance; }

  int Make(int folder, const char* file) override {
    if (Fails()) return -1;
    const int made = StateDisk::Make(folder, file);
    if (made >= 0) open_[made] = model_.now[file] = std::make_shared<Node>();
    return Changed(made);
  }
  ssize_t Write(int file, absl::string_view bytes) override {
    if (is_dead_) return Error(EIO);
    const bool fails = Fails();
    if (fails || random_.Chance(0.1)) {
      bytes = bytes.substr(0, static_cast<size_t>(random_.Between(fails ? 0 : 1, bytes.size())));
    }
    const ssize_t put = StateDisk::Write(file, bytes);
    open_[file]->written.append(bytes.data(), bytes.size());
    return fails ? Error(ENOSPC) : put;
  }
  int Sync(int descriptor) override {
    if (Fails()) return -1;
    struct stat of {};
    fstat(descriptor, &of);
    if (!S_ISDIR(of.st_mode)) {
      Node& node = *open_[descriptor];
      if (planted_ != Planted::kNoFileSync) node.synced = node.written.size();
    } else if (of.st_ino == root_) {
      model_.root_is_synced = true;
    } else if (planted_ != Planted::kNoFolderSync) {
      model_.since_sync = {model_.now};
    }
    return 0;
  }
  int Rename(int folder, const char* from, const char* to) override {
    if (Fails()) return -1;
    model_.now[to] = model_.now[from];
    model_.now.erase(from);
    return Changed(StateDisk::Rename(folder, from, to));
  }
  int Remove(int folder, const char* name, int flags) override {
    if (Fails()) return -1;
    model_.now.erase(name);
    return Changed(StateDisk::Remove(folder, name, flags));
  }
  bool IsHostMemory(int) override { return false; }

  static ino_t NumberOf(const std::string& path) {
    struct stat of {};
    stat(path.c_str(), &of);
    return of.st_ino;
  }

 private:
  static int Error(int number) {
    errno = number;
    return -1;
  }
  bool Fails() {
    is_dead_ |= ++calls_ == dies_at_;
    if (is_dead_) return Error(EIO) < 0;
    return random_.Chance(fails_) && Error(ENOSPC) < 0;
  }
  int Changed(int result) {
    model_.since_sync.push_back(model_.now);
    return result;
  }

  const ino_t root_;
  const Planted planted_;
  Random& random_;
  DiskModel model_;
  std::map<int, std::shared_ptr<Node>> open_;  // by descriptor
  int64_t calls_ = 0, dies_at_ = -1;
  double fails_ = 0;
  bool is_dead_ = false;
};

// Makes what a host finds after a power loss: changes of the folder up to one of them, and some of
// the bytes that were not synced, zeros, or none.
DiskModel LosePower(const DiskModel& model, Random& random) {
  DiskModel after;
  if (!model.root_is_synced && random.Chance(0.5)) return after;
  after.root_is_synced = true;
  const auto last = static_cast<int64_t>(model.since_sync.size()) - 1;
  for (const auto& [name, node] : model.since_sync[random.Between(0, last)]) {
    auto left = std::make_shared<Node>();
    left->written = node->written.substr(0, random.Between(node->synced, node->written.size()));
    if (random.Chance(0.3)) left->written.resize(node->written.size(), '\0');
    left->synced = left->written.size();
    after.now[name] = left;
  }
  after.since_sync = {after.now};
  return after;
}

// The folder of the only state of `root`, as the model has it.
void WriteFolder(const std::string& root, const DiskModel& model) {
  for (const fs::directory_entry& entry : fs::directory_iterator(root)) {
    for (const fs::directory_entry& file : fs::directory_iterator(entry.path())) {
      if (file.path().filename() != "lock") fs::remove(file.path());
    }
    for (const auto& [name, node] : model.now) {
      std::ofstream(entry.path() / name, std::ios::binary) << node->written;
      fs::permissions(entry.path() / name, fs::perms::owner_read | fs::perms::owner_write);
    }
    if (model.now.empty()) fs::remove_all(entry.path());
    return;
  }
}

// ---- The network: a call as its handler sees it.

struct Answer {
  grpc::Status status;
  bool holds_its_place = false;      // when it goes out
  std::optional<std::string> first;  // message; copied, since its memory is the daemon's
};

std::vector<grpc::ByteBuffer> BuffersOf(const std::vector<std::string>& messages) {
  std::vector<grpc::ByteBuffer> buffers;
  for (const std::string& message : messages) {
    const grpc::Slice slice(message);
    buffers.emplace_back(&slice, 1);
  }
  return buffers;
}

class SimulatedStream final : public CallStream {
 public:
  SimulatedStream(const StreamDeps& deps, grpc::CallbackServerContext& context, bool is_unary,
                  std::vector<grpc::ByteBuffer> messages, const FairShares& places, Answer& answer)
      : CallStream(deps, context, kSmallReply, is_unary ? &messages.front() : nullptr),
        messages_(std::move(messages)),
        places_(places),
        answer_(answer) {}
  void Over() { Done(); }

 private:
  void StartReading(grpc::ByteBuffer* message) override {
    const bool has_one = next_ < messages_.size();
    if (has_one) *message = messages_[next_++];
    ReadDone(has_one);
  }
  void StartWriting(grpc::ByteBuffer* message) override {
    Keep(*message);
    WriteDone(true);
  }
  void FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) override {
    if (last != nullptr) Keep(*last);
    answer_.status = status;
    answer_.holds_its_place = places_.held() == 1;
  }

  void Keep(const grpc::ByteBuffer& message) {
    if (answer_.first.has_value()) return;
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(message.Dump(&slices).ok());
    answer_.first.emplace();
    for (const grpc::Slice& slice : slices) {
      answer_.first->append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
  }

  const std::vector<grpc::ByteBuffer> messages_;
  const FairShares& places_;
  Answer& answer_;
  size_t next_ = 0;
};

template <class Message>
Message FirstOf(const Answer& answer) {
  Message message;
  if (answer.first.has_value()) message.ParseFromString(*answer.first);
  return message;
}

// ---- The daemon.

// Parts that the process has once, whatever happens to simulated daemons.
struct Surroundings {
  struct NoLeases final : MemoryReclaimer {
    bool MayHold(int, int64_t) const override { return false; }
    int64_t Reclaim(int, int64_t) override { return 0; }
    bool EvictOne(int) override { return false; }
  };
  RealClock clock;
  NoLeases leases;
  ReferenceBackend backend;
  SharedMemoryTable shared_memory{{}, backend, false};
  Metrics metrics;
  ModuleMetrics& of_modules = metrics.AddModules({"cpu"});
  Calls calls{{}, {}, {}, leases, clock};
  Logger log{stderr, LogFormat::kText, Severity::kError};
  CallLogLimit lines;
};

// Whether memory is reserved before it is taken.
class CheckingEngine final : public ReferenceEngine {
 public:
  CheckingEngine(bool takes_it_early, std::string& wrong)
      : takes_it_early_(takes_it_early), wrong_(wrong) {}
  void Watch(ModuleTable& table) { table_ = &table; }
  absl::StatusOr<EnginePlan> Plan(const ModuleDescription& module, const ModuleLimits& limits,
                                  const MemoryBudget& budget) const override {
    auto plan = ReferenceEngine::Plan(module, limits, budget);
    if (takes_it_early_ && plan.ok()) Take(*plan);
    return plan;
  }
  absl::StatusOr<std::unique_ptr<ModuleInstance>> Make(
      std::shared_ptr<const ModuleDescription> module, const ModuleLimits& limits,
      const EnginePlan& plan) override {
    Take(plan);
    return ReferenceEngine::Make(std::move(module), limits, plan);
  }

 private:
  void Take(const EnginePlan& plan) const {
    const ModuleTable::Bytes used = table_->UsedBytes(0);
    const int64_t planned = used.weights + used.optimizers + used.activations + used.workspaces;
    if (table_->memory().used() < planned + plan.bytes()) wrong_ = "memory taken, not reserved";
  }

  const bool takes_it_early_;
  std::string& wrong_;
  ModuleTable* table_ = nullptr;
};

struct SimulatedDaemon {
  SimulatedDaemon(Surroundings& around, const Clock& clock, const std::string& folder,
                  std::unique_ptr<SimulatedDisk> its_disk, uint64_t epoch, int64_t shadow_every,
                  Planted planted, std::string& wrong)
      : disk(*its_disk),
        engine(planted == Planted::kAllocationBeforeQuota, wrong),
        admission({.memory_bytes = kStagingBytes, .caller_max_bytes = kStagingBytes}, {}, clock),
        staging(*StagingPool::Create(kStagingBytes)),
        root(*StateRoot::Open(folder, {}, std::move(its_disk))),
        table({.memory = {kModuleBytes, kModuleBytes}, .shadow_every = shadow_every},
              {.replica = 1, .boot_epoch = epoch}, clock),
        calls({table,
               engine,
               admission,
               staging,
               nullptr,
               around.shared_memory,
               around.of_modules,
               {"cpu"},
               absl::Minutes(2),
               absl::Hours(1),
               root.get(),
               around.lines,
               absl::ZeroDuration(),
               shadow_every,
               around.log}) {
    engine.Watch(table);
  }

  SimulatedDisk& disk;
  CheckingEngine engine;
  Admission admission;
  StagingPool staging;
  std::unique_ptr<StateRoot> root;
  FairShares places{64};
  ModuleTable table;
  ModuleCalls calls;
};

// ---- The client's messages.

std::string NumbersOf(uint64_t seed, int64_t count) {
  Random random(seed);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = static_cast<float>(random.Between(-100, 100)) / 64;
  return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float));
}

struct Op {
  ModuleMethod method;
  std::vector<std::string> messages;
  bool is_done = false;
};

Op RegisterOp(const std::string& name, v1::Durability durability) {
  v1::RegisterModuleRequest request;
  request.set_name(name);
  *request.mutable_layout() = EncodeModuleLayout(OneLinear());
  request.mutable_optimizer()->mutable_sgd()->set_momentum(0.9);
  request.mutable_limits()->set_max_rows(8);
  request.mutable_limits()->set_kept_rows(8);
  request.set_durability(durability);
  return {ModuleMethod::kRegister, {request.SerializeAsString()}};
}

Op PutOp(const std::string& token) {
  v1::PutTensorsRequest header, tensor, chunk, commit;
  header.mutable_header()->set_token(token);
  tensor.mutable_tensor()->set_kind(v1::TENSOR_KIND_WEIGHT);
  tensor.mutable_tensor()->set_name("layer.weight");
  tensor.mutable_tensor()->set_element(v1::ELEMENT_FLOAT32);
  for (int n = 0; n < 2; ++n) tensor.mutable_tensor()->add_shape(kWidth);
  chunk.mutable_chunk()->set_data(NumbersOf(0, kWidth * kWidth));
  commit.mutable_commit()->set_complete(true);
  return {ModuleMethod::kPutTensors,
          {header.SerializeAsString(), tensor.SerializeAsString(), chunk.SerializeAsString(),
           commit.SerializeAsString()}};
}

Op BackwardOp(const std::string& token, uint64_t sequence, uint32_t micro_batch) {
  v1::ModuleBackwardRequest first;
  v1::ModuleBackwardHeader& header = *first.mutable_header();
  header.set_token(token);
  header.set_sequence(sequence);
  header.set_micro_batch(micro_batch);
  v1::ModuleForwardHeader& forward = *header.mutable_forward();
  forward.set_token(token);
  forward.set_training(true);
  forward.mutable_rows()->set_batch(1);
  forward.mutable_rows()->set_length(kRows);
  Op op = {ModuleMethod::kBackward, {}};
  std::vector<std::string> chunks;
  for (const int field : {kXField, kDyField}) {
    v1::ModuleBackwardRequest chunk;
    chunk.mutable_chunk()->set_tensor(static_cast<uint32_t>(field));
    chunk.mutable_chunk()->set_data(NumbersOf(
        sequence * 100 + micro_batch * 10 + static_cast<uint64_t>(field), kRows * kWidth));
    v1::PayloadSize& size = *header.add_payload();
    size.set_tensor(static_cast<uint32_t>(field));
    size.set_bytes(chunk.chunk().data().size());
    chunks.push_back(chunk.SerializeAsString());
  }
  op.messages.push_back(first.SerializeAsString());
  op.messages.insert(op.messages.end(), chunks.begin(), chunks.end());
  return op;
}

Op StepOp(const std::string& token, uint64_t sequence) {
  v1::StepRequest request;
  request.set_token(token);
  request.set_sequence(sequence);
  request.set_micro_batches(kMicroBatches);
  request.add_group()->set_learning_rate(0.1);
  return {ModuleMethod::kStep, {request.SerializeAsString()}};
}

// ---- A schedule.

// Lies where files cost least: what a disk does to them is simulated.
std::string NewFolder() {
  const std::string memory = "/dev/shm";
  const std::string place = access(memory.c_str(), W_OK) == 0 ? memory : testing::TempDir();
  std::string folder = place + "/simulation_XXXXXX";
  CHECK(mkdtemp(folder.data()) != nullptr) << folder;
  return folder;
}

class Simulation {
 public:
  // `weights`: [sequence], of an undisturbed run; null: this is one, and gathers them.
  Simulation(Surroundings& around, uint64_t seed, Planted planted,
             const std::vector<std::string>* weights)
      : around_(around), random_(seed), planted_(planted), weights_(weights) {
    if (random_.Chance(0.3)) shadow_every_ = random_.Between(1, 3);  // in memory of the host
    Boot({});
  }
  ~Simulation() {
    daemon_.reset();
    fs::remove_all(folder_);
  }

  // Returns what is wrong; empty: nothing.
  std::string Run() {
    for (tick_ = 0; wrong_.empty() && sequence_ < kLastSequence; ++tick_) {
      if (tick_ == kMostTicks) wrong_ = "no end";
      clock_.Advance(absl::Seconds(1));
      if (ops_.empty()) Plan();
      Act();
    }
    token_.clear();
    while (!neighbours_.empty()) ReleaseNeighbour();
    if (wrong_.empty() && daemon_->table.Of("b").size() != 0) wrong_ = "modules stay";
    return wrong_;
  }
  const std::vector<std::string>& gathered() const { return gathered_; }

 private:
  bool is_disk() const { return shadow_every_ == 0; }
  bool IsFaulty() const { return weights_ != nullptr && tick_ < kFaultyTicks; }
  bool Happens(double chance) { return IsFaulty() && random_.Chance(chance); }

  void Boot(DiskModel model) {
    auto disk = std::make_unique<SimulatedDisk>(folder_, planted_, random_, std::move(model));
    daemon_.emplace(around_, clock_, folder_, std::move(disk), ++epoch_, shadow_every_, planted_,
                    wrong_);
    neighbours_.clear();
  }

  // The process dies; what is on its way to it stays there.
  void Crash() {
    daemon_->disk.Die();  // what destructors would clean up, a dead process does not
    DiskModel model = daemon_->disk.model();
    daemon_.reset();
    if (is_disk() && random_.Chance(0.5)) {
      model = LosePower(model, random_);
      WriteFolder(folder_, model);
    }
    Boot(std::move(model));
    has_seen_state_ = false;
  }

  bool IsRepeating() const { return stepping_.has_value() && *stepping_ + 1 == sequence_; }

  void Plan() {
    ++generation_;
    if (token_.empty()) {
      ops_ = {RegisterOp("m", is_disk() ? v1::DURABILITY_DISK : v1::DURABILITY_HOST)};
    } else if (sequence_ == 0) {
      ops_ = {PutOp(token_)};
    } else if (IsRepeating()) {
      ops_ = {StepOp(token_, *stepping_)};  // its reply has not come: it counts all the same
    } else {
      for (uint32_t n = 0; n < kMicroBatches; ++n) {
        ops_.push_back(BackwardOp(token_, sequence_, n));
      }
      ops_.push_back(StepOp(token_, sequence_));
    }
  }

  // One thing that may happen.
  void Act() {
    if (Happens(0.02)) return Crash();
    if (Happens(0.05)) daemon_->disk.DieWithin(12);
    daemon_->disk.FailOften(Happens(0.2) ? 0.1 : 0);
    if (Happens(0.1)) return RegisterNeighbour();
    if (Happens(0.1)) return ReleaseNeighbour();
    if (!IsFaulty() && !neighbours_.empty()) return ReleaseNeighbour();  // the client gets room
    const int64_t what = random_.Between(0, 2);
    if (what == 0 || (on_way_.empty() && answers_.empty())) return Send();
    if (what == 1 && !on_way_.empty()) return Deliver();
    if (!answers_.empty()) Receive();
  }

  struct OnWay {
    int generation;
    size_t op;
    ModuleMethod method;
    std::vector<std::string> messages;
  };

  void Send() {
    std::vector<size_t> ready;
    bool all_before = true;
    for (size_t n = 0; n < ops_.size(); ++n) {
      if (!ops_[n].is_done && (all_before || ops_[n].method == ModuleMethod::kBackward)) {
        ready.push_back(n);
      }
      all_before = all_before && ops_[n].is_done;
    }
    const size_t op = ready[random_.Between(0, static_cast<int64_t>(ready.size()) - 1)];
    if (ops_[op].method == ModuleMethod::kStep && !IsRepeating()) stepping_ = sequence_;
    on_way_.push_back({generation_, op, ops_[op].method, ops_[op].messages});
  }

  void Deliver() {
    const auto at = on_way_.begin() + random_.Between(0, static_cast<int64_t>(on_way_.size()) - 1);
    const OnWay call = *at;
    if (!Happens(0.2)) on_way_.erase(at);  // else it comes again
    if (Happens(0.1)) return;              // it is lost
    const Answer answer = Serve("a", call.method, call.messages);
    if (daemon_->disk.is_dead()) return Crash();
    Check(call.method, answer);
    if (!Happens(0.1)) answers_.push_back({call.generation, call.op, answer});
  }

  Answer Serve(const std::string& caller, ModuleMethod method,
               const std::vector<std::string>& messages) {
    Answer answer;
    grpc::CallbackServerContext context;
    const bool is_unary = method != ModuleMethod::kPutTensors && method != ModuleMethod::kBackward;
    auto* stream = new SimulatedStream({clock_, around_.metrics, around_.calls}, context, is_unary,
                                       BuffersOf(messages), daemon_->places, answer);
    FairShares::Share place;
    const FairShares::Holder holder = {caller, "address"};
    daemon_->places.Take(holder, 1, place);
    EXPECT_TRUE(stream->Enter(std::move(place), holder).ok());
    ModuleCall call{*stream, caller, CallWait{stream->stop(), Patience(method, messages)},
                    absl::ZeroDuration()};
    const absl::Status status = daemon_->calls.Run(method, call);
    stream->Finish(
        grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message())));
    stream->Over();
    if (!answer.holds_its_place) wrong_ = "a place is left before the reply is out";
    if (daemon_->staging.used() != 0 || daemon_->admission.Use().bytes != 0) {
      wrong_ = "staging memory stays";
    }
    if (daemon_->places.held() != 0) wrong_ = "a place stays";
    if (around_.calls.call_bytes().held() != 0) wrong_ = "room stays";
    if (daemon_->table.memory().used() > kModuleBytes) wrong_ = "the quota of modules is exceeded";
    return answer;
  }

  // A micro-batch that is early would wait for others, which cannot come before it ends here.
  absl::Time Patience(ModuleMethod method, const std::vector<std::string>& messages) {
    if (method != ModuleMethod::kBackward) return absl::InfiniteFuture();
    v1::ModuleBackwardRequest request;
    request.ParseFromString(messages.front());
    const auto module = daemon_->table.FindByName("a", "m");
    if (!module.ok()) return absl::InfiniteFuture();
    const v1::ModuleStatus status = (*module)->Status();
    const uint32_t added = status.micro_batches_size() == 0 ? 0 : status.micro_batches(1);
    return request.header().micro_batch() > added ? absl::InfinitePast() : absl::InfiniteFuture();
  }

  void Check(ModuleMethod method, const Answer& answer) {
    if (method == ModuleMethod::kStep && answer.status.ok()) {
      durable_ = std::max(durable_, FirstOf<v1::StepResponse>(answer).durable_sequence());
    }
    if (method == ModuleMethod::kPutTensors && answer.status.ok()) {
      durable_ =
          std::max(durable_, FirstOf<v1::PutTensorsResponse>(answer).status().durable_sequence());
    }
    const auto module = daemon_->table.FindByName("a", "m");
    if (!module.ok()) return;
    auto hold = (*module)->Take(std::nullopt, {{}, absl::InfiniteFuture()});
    if (!hold.ok()) {
      wrong_ = absl::StrCat("a module is lost: ", hold.status().message());
      return;
    }
    const uint64_t sequence = hold->sequence();
    if (!std::exchange(has_seen_state_, true) && sequence < durable_) {
      wrong_ = absl::StrCat("step ", durable_, " was durable; found is ", sequence);
    }
    if (sequence == 0) return;
    std::string weights(kWidth * kWidth * sizeof(float), '\0');
    const absl::Status got =
        hold->instance().Get(0, TensorRole::kWeight, ElementType::kFloat32,
                             {reinterpret_cast<std::byte*>(weights.data()), weights.size()});
    if (!got.ok()) wrong_ = std::string(got.message());
    if (weights_ == nullptr) {
      gathered_.resize(kLastSequence + 1);
      gathered_[sequence] = weights;
    } else if (weights != weights_->at(sequence)) {
      wrong_ = absl::StrCat("other weights than an undisturbed run has at sequence ", sequence);
    }
  }

  void Receive() {
    const auto at =
        answers_.begin() + random_.Between(0, static_cast<int64_t>(answers_.size()) - 1);
    const Received received = *at;
    answers_.erase(at);
    if (received.generation != generation_ || ops_[received.op].is_done) return;
    const grpc::StatusCode code = received.answer.status.error_code();
    if (code == grpc::DEADLINE_EXCEEDED || code == grpc::UNAVAILABLE) return;  // it is tried again
    if (!received.answer.status.ok()) return Forget();
    Op& op = ops_[received.op];
    op.is_done = true;
    if (op.method == ModuleMethod::kRegister) {
      const auto response = FirstOf<v1::RegisterModuleResponse>(received.answer);
      token_ = response.token();
      sequence_ = response.status().sequence();
    } else if (op.method == ModuleMethod::kPutTensors) {
      sequence_ = FirstOf<v1::PutTensorsResponse>(received.answer).status().sequence();
    } else if (op.method == ModuleMethod::kStep) {
      const auto response = FirstOf<v1::StepResponse>(received.answer);
      if (IsRepeating() && !response.replayed()) wrong_ = "a step counted twice";
      sequence_ = response.sequence();
      stepping_.reset();
    }
    if (op.method != ModuleMethod::kBackward) ops_.clear();
  }

  // The client does not know what is there any more: it asks.
  void Forget() {
    token_.clear();
    ops_.clear();
  }

  // Another caller's modules, which share the memory.
  void RegisterNeighbour() {
    const Op op = RegisterOp(absl::StrCat("n", tick_), v1::DURABILITY_PROCESS);
    const Answer answer = Serve("b", op.method, op.messages);
    if (!answer.status.ok()) return;
    neighbours_.push_back(FirstOf<v1::RegisterModuleResponse>(answer).token());
  }
  void ReleaseNeighbour() {
    if (neighbours_.empty()) return;
    v1::ReleaseModuleRequest request;
    request.set_token(neighbours_.back());
    neighbours_.pop_back();
    Serve("b", ModuleMethod::kRelease, {request.SerializeAsString()});
  }

  struct Received {
    int generation;
    size_t op;
    Answer answer;
  };

  Surroundings& around_;
  Random random_;
  const Planted planted_;
  const std::vector<std::string>* const weights_;
  std::vector<std::string> gathered_;
  const std::string folder_ = NewFolder();
  FakeClock clock_{absl::Now()};
  std::string wrong_;
  int64_t shadow_every_ = 0;  // 0: on a disk
  uint64_t epoch_ = 0;
  int tick_ = 0;
  std::optional<SimulatedDaemon> daemon_;
  std::vector<std::string> neighbours_;  // tokens
  uint64_t durable_ = 0;                 // as replies told
  bool has_seen_state_ = false;          // since the daemon began

  std::vector<OnWay> on_way_;
  std::vector<Received> answers_;
  std::string token_;
  uint64_t sequence_ = 0;             // as the client knows
  std::optional<uint64_t> stepping_;  // sequence of a step that was sent, until its reply comes
  std::vector<Op> ops_;
  int generation_ = 0;
};

class ModuleSimulation : public ::testing::Test {
 protected:
  ModuleSimulation() {
    Simulation undisturbed(around_, 0, Planted::kNone, nullptr);
    const std::string wrong = undisturbed.Run();
    EXPECT_EQ(wrong, "");
    weights_ = undisturbed.gathered();
  }
  std::string Run(uint64_t seed, Planted planted) {
    return Simulation(around_, seed, planted, &weights_).Run();
  }

  Surroundings around_;
  std::vector<std::string> weights_;
};

uint64_t NumberFrom(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST_F(ModuleSimulation, CountsEachCallOnceAndLosesNoDurableStep) {
  const uint64_t first = NumberFrom("ATTND_TEST_SEED", 1);
  const uint64_t end = first + NumberFrom("ATTND_TEST_SCHEDULES", 600);
  for (uint64_t seed = first; seed < end; ++seed) {
    ASSERT_EQ(Run(seed, Planted::kNone), "") << "ATTND_TEST_SEED=" << seed;
  }
}

TEST_F(ModuleSimulation, FindsMistakesThatArePlanted) {
  for (const Planted planted :
       {Planted::kNoFileSync, Planted::kNoFolderSync, Planted::kAllocationBeforeQuota}) {
    uint64_t seed = 1;
    while (seed <= 300 && Run(seed, planted).empty()) ++seed;
    std::cout << "mistake " << static_cast<int>(planted) << ": found by schedule " << seed << "\n";
    EXPECT_LE(seed, 300) << static_cast<int>(planted);
  }
}

}  // namespace
}  // namespace attnd
