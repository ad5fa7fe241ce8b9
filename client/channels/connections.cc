#include "client/channels/connections.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "client/channels/address.h"
#include "client/channels/credentials.h"
#include "client/channels/error_class.h"
#include "client/types/error_detail.h"

namespace attnd {
namespace {

constexpr absl::Duration kLookUpAgain = absl::Seconds(1);
constexpr absl::Duration kWatchEvery = absl::Seconds(1);  // for names that are due

absl::Status OutOfRange(absl::string_view option, absl::string_view expected, int64_t got) {
  return absl::InvalidArgumentError(absl::StrCat(option, ": expected ", expected, ", got ", got));
}

absl::Status ValidateOptions(const ClientOptions& o) {
  if (o.addresses.empty()) return OutOfRange("addresses", "at least one", 0);
  for (const std::string& address : o.addresses) {
    absl::Status status = CheckAddress(address);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("addresses: ", status.message()));
    }
  }
  if (o.channels_per_address < 1 || o.channels_per_address > 64) {
    return OutOfRange("channels_per_address", "1..64", o.channels_per_address);
  }
  if (o.retry.max_attempts < 1)
    return OutOfRange("retry.max_attempts", "1 or more", o.retry.max_attempts);
  if (o.shard_bytes < 1) return OutOfRange("shard_bytes", "1 or more", o.shard_bytes);
  if (o.shared_memory_bytes < 0) {
    return OutOfRange("shared_memory_bytes", "0 or more", o.shared_memory_bytes);
  }
  if (o.max_reply_bytes < 1 || o.max_reply_bytes > INT32_MAX) {
    return OutOfRange("max_reply_bytes", "1..2147483647", o.max_reply_bytes);
  }
  if (o.timeout <= absl::ZeroDuration()) {
    return OutOfRange("timeout", "above 0", absl::ToInt64Nanoseconds(o.timeout));
  }
  return absl::OkStatus();
}

// Without the BDP probe a connection begins with a window of 64 KiB, for which the reply of a small
// call waits, and half of a link with 20 ms of round trip stays empty. Within a host the probe
// costs 5 to 9 % of a large transfer. gRPC's own retries are off: they would hold slices of the
// caller's arrays, and cover only requests below 256 KiB. The keepalive timeout is TCP_USER_TIMEOUT
// as well, which ends writes to a peer that has stopped reading.
grpc::ChannelArguments MakeArguments(const ClientOptions& options, const Proxy& proxy,
                                     bool this_host, bool spare) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, proxy.url.empty() ? 0 : 1);
  if (!proxy.url.empty()) arguments.SetString(GRPC_ARG_HTTP_PROXY, proxy.url);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection for each channel
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, this_host && !spare ? 0 : 1);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, this_host ? 4 << 20 : 1 << 20);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetMaxReceiveMessageSize(static_cast<int>(options.max_reply_bytes));
  // A compressed reply could be larger than the limit.
  arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  arguments.SetMaxSendMessageSize(-1);  // PlanShards keeps to the server's limit
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(Connections::kWriteTimeout)));
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);  // a connection attempt's time limit
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  arguments.SetUserAgentPrefix("attnd-cpp");
  if (options.tls.has_value() && !options.tls->server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls->server_name);
  }
  return arguments;
}

}  // namespace

void Connection::Enter(grpc::ClientContext* context) {
  absl::MutexLock lock(&mutex_);
  contexts_.insert(context);
  if (retired_) context->TryCancel();
}

void Connection::Leave(grpc::ClientContext* context) {
  absl::MutexLock lock(&mutex_);
  contexts_.erase(context);
}

void Connection::Retire() {
  absl::MutexLock lock(&mutex_);
  retired_ = true;
  for (grpc::ClientContext* context : contexts_) context->TryCancel();
}

void Connection::RetireUnlessConnected() {
  if (channel_->GetState(false) != GRPC_CHANNEL_READY) return Retire();
  absl::MutexLock lock(&mutex_);
  retired_ = true;
}

bool Connection::retired() const {
  absl::MutexLock lock(&mutex_);
  return retired_;
}

absl::StatusOr<std::unique_ptr<Connections>> Connections::Create(const ClientOptions& options,
                                                                 const Clock& clock,
                                                                 ReplicaLookup lookup) {
  RETURN_IF_ERROR(ValidateOptions(options));
  ASSIGN_OR_RETURN(auto credentials, MakeCredentials(options));
  ASSIGN_OR_RETURN(Proxy proxy, ProxyOf(options.proxy));
  std::unique_ptr<Connections> connections(
      new Connections(options, std::move(credentials), std::move(proxy), clock, std::move(lookup)));
  if (!connections->names_.empty()) {
    connections->watch_.emplace(kWatchEvery,
                                [watched = connections.get()] { watched->WatchNames(); });
  }
  return connections;
}

Connections::~Connections() { watch_.reset(); }

void Connections::WatchNames() {
  for (size_t n = 0; n < names_.size(); ++n) {
    {
      absl::MutexLock lock(&mutex_);
      if (clock_.Now() < names_[n].due) continue;
      names_[n].due = clock_.Now() + names_[n].name.look_up_every();
    }
    Update(static_cast<int>(n), lookup_(names_[n].name));
  }
}

void Connections::LookUpNames() {
  for (size_t n = 0; n < names_.size(); ++n) Update(static_cast<int>(n), lookup_(names_[n].name));
}

Connections::Connections(const ClientOptions& options,
                         std::shared_ptr<grpc::ChannelCredentials> credentials, Proxy proxy,
                         const Clock& clock, ReplicaLookup lookup)
    : options_(options),
      credentials_(std::move(credentials)),
      proxy_(std::move(proxy)),
      clock_(clock),
      lookup_(std::move(lookup)),
      picker_(clock, options.channels_per_address, absl::Uniform<uint64_t>(absl::BitGen())),
      prober_(options.bearer_token,
              {.channel = [this](AddressId address) { return ChannelToProbe(address); },
               .verdict = [this](AddressId address, bool answers) { Probed(address, answers); }}) {
  for (const std::string& address : options.addresses) AddAddress(address);
  picker_.Begin();
  Fit();
}

void Connections::Fit() {
  const auto before = std::exchange(connections_, {});
  for (const Picker::Slot& slot : picker_.slots()) {
    const auto open = before.find(slot.id);
    connections_[slot.id] = open == before.end() ? Open(slot) : open->second;
  }
}

// A host without addresses now is left to gRPC, which asks again. Files may be written yet: an
// address that nobody has stands for them.
void Connections::AddAddress(const std::string& address) {
  std::optional<ReplicaName> name = ReplicaNameOf(address);
  std::vector<std::string> targets;
  if (name.has_value()) targets = lookup_(*name);
  const bool is_grpcs = !name.has_value() || name->kind == ReplicaName::Kind::kDns;
  if (targets.empty() && is_grpcs) {
    picker_.Add(address);
    return;
  }
  names_.push_back({*std::move(name)});
  const int number = static_cast<int>(names_.size()) - 1;
  if (targets.empty()) picker_.Add(address, number, true);
  for (std::string& target : targets) picker_.Add(std::move(target), number);
}

std::shared_ptr<Connection> Connections::Open(const Picker::Slot& slot) const {
  const std::string& target = picker_.target(slot.address);
  const int from = picker_.name(slot.address);
  const bool this_host = IsLocalAddress(target);
  grpc::ChannelArguments arguments = MakeArguments(options_, proxy_, this_host, slot.spare);
  if (from >= 0 && names_[from].name.kind == ReplicaName::Kind::kDns) {
    // A certificate is for it.
    const ReplicaName& name = names_[from].name;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, absl::StrCat(name.host, ":", name.port));
    if (options_.tls.has_value() && options_.tls->server_name.empty()) {
      arguments.SetSslTargetNameOverride(name.host);
    }
  }
  auto channel = grpc::CreateCustomChannel(target, credentials_, arguments);
  return std::make_shared<Connection>(std::move(channel), slot, picker_.id(slot.address));
}

std::shared_ptr<Connection> Connections::Acquire(int64_t bytes, const std::vector<bool>& tried,
                                                 int only) {
  absl::MutexLock lock(&mutex_);
  return connections_.at(picker_.Pick(bytes, tried, only).id);
}

void Connections::Release(const Connection& connection, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  picker_.Release(connection.slot(), bytes);
}

int Connections::idle_count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(absl::c_count_if(picker_.slots(), [](const Picker::Slot& slot) {
    return !slot.spare && slot.outstanding_bytes == 0;
  }));
}

bool Connections::on_this_host() const {
  return absl::c_all_of(options_.addresses, IsLocalAddress);
}

int Connections::address_count() const {
  absl::MutexLock lock(&mutex_);
  return picker_.address_count();
}

bool Connections::IsGone(int address_index) const {
  absl::MutexLock lock(&mutex_);
  return picker_.is_gone(address_index);
}

std::vector<int> Connections::usable_addresses() const {
  absl::MutexLock lock(&mutex_);
  return picker_.usable_addresses();
}

int Connections::count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(
      absl::c_count_if(picker_.slots(), [](const Picker::Slot& slot) { return !slot.spare; }));
}

bool Connections::ReportUnavailable(int address_index, absl::Time begun) {
  int name = -1;
  {
    absl::MutexLock lock(&mutex_);
    if (!picker_.ReportUnavailable(address_index, begun)) return false;
    const absl::Time now = clock_.Now();
    const int of = picker_.name(address_index);
    if (of >= 0 && now >= names_[of].look_up_after) {
      names_[of].look_up_after = now + kLookUpAgain;
      name = of;
    }
  }
  if (name >= 0) Update(name, lookup_(names_[name].name));
  return true;
}

// A name that cannot be looked up now keeps what it had.
void Connections::Update(int name, const std::vector<std::string>& all) {
  if (all.empty()) return;
  std::vector<std::shared_ptr<Connection>> left;
  {
    absl::MutexLock lock(&mutex_);
    for (uint64_t slot : picker_.Follow(name, all)) left.push_back(connections_.at(slot));
    Fit();
    std::erase_if(left_, [](const auto& connection) { return connection.expired(); });
    left_.insert(left_.end(), left.begin(), left.end());
  }
  for (const std::shared_ptr<Connection>& connection : left) connection->RetireUnlessConnected();
}

bool Connections::HasNoAddress() const {
  absl::MutexLock lock(&mutex_);
  return picker_.all_gone();
}

absl::Status Connections::NameProxy(absl::Status status) const {
  const bool is_late = absl::IsDeadlineExceeded(status);
  if ((absl::IsUnavailable(status) || is_late) && !DetailOf(status).has_value() && HasNoAddress()) {
    const std::string why = absl::StrJoin(names_, "; ", [](std::string* text, const Name& name) {
      absl::StrAppend(text, WhyNoReplica(name.name));
    });
    if (is_late) return absl::DeadlineExceededError(why);
    return WithReason(absl::UnavailableError(why), "NO_ADDRESS");
  }
  if (status.ok() || proxy_.url.empty() || DetailOf(status).has_value()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), "; through the proxy ", proxy_.shown));
}

absl::Status Connections::StatusOf(const Connection& connection, absl::Status status,
                                   bool by_caller) const {
  // gRPC calls it UNKNOWN where a connection ends beneath a call.
  if (absl::IsUnknown(status) && status.message() == "Stream removed") {
    status = absl::UnavailableError("the connection ended: Stream removed");
  }
  status = NameProxy(std::move(status));
  if (absl::IsCancelled(status) && connection.retired()) {
    return absl::UnavailableError("the connection was closed because its peer did not answer");
  }
  return UnavailableIfCancelled(status, by_caller);
}

std::string Connections::target(int address_index) {
  absl::MutexLock lock(&mutex_);
  return picker_.target(address_index);
}

void Connections::ReportAlive(int address_index) {
  absl::MutexLock lock(&mutex_);
  picker_.ReportAlive(address_index);
}

void Connections::ReportMoved(int address_index, int64_t bytes, absl::Duration took) {
  absl::MutexLock lock(&mutex_);
  picker_.ReportMoved(address_index, bytes, took);
}

void Connections::ReportQueue(int address_index, absl::Duration queue) {
  absl::MutexLock lock(&mutex_);
  picker_.ReportQueue(address_index, queue);
}

void Connections::ReportModules(int address_index, const ReportedLoad& load) {
  absl::MutexLock lock(&mutex_);
  picker_.ReportModules(address_index, load);
}

std::optional<ReportedLoad> Connections::modules_of(int address_index) const {
  absl::MutexLock lock(&mutex_);
  return picker_.modules_of(address_index);
}

// A call that still waits for a connection to an address that is gone goes elsewhere at once.
void Connections::Suspect(const std::shared_ptr<Connection>& connection, absl::Time silent_since) {
  bool is_gone;
  {
    absl::MutexLock lock(&mutex_);
    if (!picker_.Suspects(connection->address(), silent_since)) return;
    const std::optional<int> index = picker_.index_of(connection->address());
    is_gone = !index.has_value() || picker_.is_gone(*index);
  }
  if (is_gone && connection->channel()->GetState(false) != GRPC_CHANNEL_READY) {
    Replace(connection);
  } else {
    prober_.Ask(connection->address());
  }
}

std::shared_ptr<Connection> Connections::SpareOf(int address_index) {
  for (const Picker::Slot& slot : picker_.slots()) {
    if (slot.address == address_index && slot.spare) return connections_.at(slot.id);
  }
  CHECK(false) << "no connection for small calls to address " << address_index;
}

std::vector<std::shared_ptr<Connection>> Connections::ToAsk(int calls) {
  std::vector<std::shared_ptr<Connection>> connections;
  absl::MutexLock lock(&mutex_);
  for (int address : picker_.ToAsk(calls)) connections.push_back(SpareOf(address));
  return connections;
}

absl::Duration Connections::asking_patience() const {
  absl::MutexLock lock(&mutex_);
  return picker_.asking_patience();
}

void Connections::Asked(absl::Duration took) {
  absl::MutexLock lock(&mutex_);
  picker_.Asked(took);
}

std::shared_ptr<grpc::Channel> Connections::ChannelToProbe(AddressId address) {
  absl::MutexLock lock(&mutex_);
  const std::optional<int> index = picker_.index_of(address);
  if (index.has_value()) {
    const bool is_over = picker_.is_gone(*index) && picker_.is_silent(*index);
    return is_over ? nullptr : SpareOf(*index)->channel();
  }
  for (const std::weak_ptr<Connection>& one : left_) {
    const std::shared_ptr<Connection> connection = one.lock();
    if (connection != nullptr && connection->address() == address) return connection->channel();
  }
  return nullptr;
}

void Connections::Probed(AddressId address, bool answers) {
  std::vector<std::shared_ptr<Connection>> stuck;
  {
    absl::MutexLock lock(&mutex_);
    for (uint64_t slot : picker_.Probed(address, answers)) stuck.push_back(connections_.at(slot));
    if (!answers) {
      for (const std::weak_ptr<Connection>& one : std::exchange(left_, {})) {
        const std::shared_ptr<Connection> connection = one.lock();
        if (connection == nullptr) continue;
        if (connection->address() == address) {
          stuck.push_back(connection);
        } else {
          left_.push_back(one);
        }
      }
    }
  }
  for (const std::shared_ptr<Connection>& connection : stuck) Replace(connection);
}

void Connections::Replace(const std::shared_ptr<Connection>& stuck) {
  {
    absl::MutexLock lock(&mutex_);
    if (picker_.Renew(stuck->slot())) Fit();
  }
  stuck->Retire();
}

std::shared_ptr<Connection> Connections::Of(int address_index) {
  return FirstOf(address_index, 1).front();
}

std::vector<std::shared_ptr<Connection>> Connections::FirstOf(int address_index, size_t most) {
  std::vector<std::shared_ptr<Connection>> found;
  absl::MutexLock lock(&mutex_);
  for (const Picker::Slot& slot : picker_.slots()) {
    const bool is_there = slot.address == address_index;
    if (is_there && found.size() < most) found.push_back(connections_.at(slot.id));
  }
  CHECK(!found.empty()) << "no connection to address " << address_index;
  return found;
}

}  // namespace attnd
