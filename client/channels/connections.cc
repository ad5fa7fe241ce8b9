#include "client/channels/connections.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/hash/hash.h"
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

constexpr absl::Duration kFirstSuspension = absl::Milliseconds(100);
constexpr absl::Duration kLongestSuspension = absl::Seconds(5);
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
    connections->watch_ = std::thread([watched = connections.get()] { watched->WatchNames(); });
  }
  return connections;
}

Connections::~Connections() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (watch_.joinable()) watch_.join();
}

void Connections::WatchNames() {
  auto stopping = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_; };
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopping), kWatchEvery)) return;
    }
    for (size_t n = 0; n < names_.size(); ++n) {
      {
        absl::MutexLock lock(&mutex_);
        if (clock_.Now() < names_[n].due) continue;
        names_[n].due = clock_.Now() + names_[n].name.look_up_every();
      }
      Update(static_cast<int>(n), lookup_(names_[n].name));
    }
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
      client_(absl::Uniform<uint64_t>(absl::BitGen())),
      prober_(options.bearer_token,
              {.channel = [this](int address) { return ChannelToProbe(address); },
               .verdict = [this](int address, bool answers) { Probed(address, answers); }}) {
  for (const std::string& address : options.addresses) AddAddress(address);
  KeepMostAddresses();
  for (int address = 0; address < address_count(); ++address) AddSlots(address);
}

void Connections::AddSlots(int address_index) {
  for (int n = 0; n < ConnectionsPerAddress(); ++n) slots_.push_back({Open(address_index, false)});
  slots_.push_back({Open(address_index, true), true});
}

int Connections::ConnectionsPerAddress() const {
  const int addresses = static_cast<int>(addresses_.size());
  if (addresses == 1) return options_.channels_per_address;
  return std::clamp(kMaxConnections / addresses - 1, 1, options_.channels_per_address);
}

// Closes what is too much since addresses have joined, as far as nothing runs on it.
void Connections::FitSlots() {
  std::vector<int> count(addresses_.size(), 0);
  std::erase_if(slots_, [&](const Slot& slot) {
    if (slot.spare || count[slot.connection->address_index()] < ConnectionsPerAddress()) {
      if (!slot.spare) ++count[slot.connection->address_index()];
      return false;
    }
    return slot.outstanding_bytes == 0;
  });
}

uint64_t Connections::Rank(const std::string& target) const {
  return absl::HashOf(client_, target);
}

std::vector<std::string> Connections::Kept(std::vector<std::string> targets, size_t most) const {
  if (targets.size() <= most) return targets;
  std::vector<uint64_t> ranks;
  for (const std::string& target : targets) ranks.push_back(Rank(target));
  std::sort(ranks.begin(), ranks.end(), std::greater<>());
  std::erase_if(targets, [&](const std::string& target) { return Rank(target) < ranks[most - 1]; });
  return targets;
}

void Connections::KeepMostAddresses() {
  std::vector<std::string> targets;
  for (const Address& address : addresses_) targets.push_back(address.target);
  targets = Kept(std::move(targets), kMaxAddresses);
  std::erase_if(addresses_, [&](const Address& address) {
    return !absl::c_linear_search(targets, address.target);
  });
  if (addresses_.size() > kMaxAddresses) addresses_.resize(kMaxAddresses);  // some twice
  absl::BitGen random;
  for (Address& address : addresses_) address.last_picked = absl::Uniform<uint32_t>(random);
}

// A host without addresses now is left to gRPC, which asks again. Files may be written yet: an
// address that nobody has stands for them.
void Connections::AddAddress(const std::string& address) {
  std::optional<ReplicaName> name = ReplicaNameOf(address);
  std::vector<std::string> targets;
  if (name.has_value()) targets = lookup_(*name);
  const bool is_grpcs = !name.has_value() || name->kind == ReplicaName::Kind::kDns;
  if (targets.empty() && is_grpcs) {
    addresses_.push_back({.target = address});
    return;
  }
  names_.push_back({*std::move(name)});
  if (targets.empty()) {
    addresses_.push_back(
        {.target = address, .name = static_cast<int>(names_.size()) - 1, .gone = true});
  }
  for (std::string& target : targets) {
    addresses_.push_back(
        {.target = std::move(target), .name = static_cast<int>(names_.size()) - 1});
  }
}

std::shared_ptr<Connection> Connections::Open(int address_index, bool spare) const {
  const Address& address = addresses_[address_index];
  const bool this_host = IsLocalAddress(address.target);
  grpc::ChannelArguments arguments = MakeArguments(options_, proxy_, this_host, spare);
  if (address.name >= 0 && names_[address.name].name.kind == ReplicaName::Kind::kDns) {
    // A certificate is for it.
    const ReplicaName& name = names_[address.name].name;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, absl::StrCat(name.host, ":", name.port));
    if (options_.tls.has_value() && options_.tls->server_name.empty()) {
      arguments.SetSslTargetNameOverride(name.host);
    }
  }
  auto channel = grpc::CreateCustomChannel(address.target, credentials_, arguments);
  return std::make_shared<Connection>(std::move(channel), address_index);
}

std::shared_ptr<Connection> Connections::Acquire(int64_t bytes, const std::vector<bool>& tried,
                                                 int only) {
  absl::MutexLock lock(&mutex_);
  absl::Time now = clock_.Now();
  auto begins_after = [&](const Address& address) {
    return absl::ToDoubleSeconds(std::max(absl::ZeroDuration(), address.queue_ends - now));
  };
  auto rank = [&](const Slot& slot) {
    int a = slot.connection->address_index();
    bool was_there = a < static_cast<int>(tried.size()) && tried[a];
    return std::make_tuple(
        slot.spare && bytes > kSmallCallBytes, only >= 0 && a != only, was_there,
        addresses_[a].gone, !IsUsable(addresses_[a], now),
        begins_after(addresses_[a]) + static_cast<double>(slot.outstanding_bytes) / rate_,
        slot.spare, addresses_[a].last_picked);
  };
  Slot& best = *std::min_element(slots_.begin(), slots_.end(),
                                 [&](const Slot& x, const Slot& y) { return rank(x) < rank(y); });
  best.outstanding_bytes += bytes;
  addresses_[best.connection->address_index()].last_picked = ++picks_;
  return best.connection;
}

void Connections::Release(const Connection& connection, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  for (Slot& slot : slots_) {
    if (slot.connection.get() == &connection) slot.outstanding_bytes -= bytes;
  }
}

int Connections::idle_count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(absl::c_count_if(
      slots_, [](const Slot& slot) { return !slot.spare && slot.outstanding_bytes == 0; }));
}

bool Connections::on_this_host() const {
  return absl::c_all_of(options_.addresses, IsLocalAddress);
}

int Connections::address_count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(addresses_.size());
}

std::vector<int> Connections::usable_addresses() const {
  absl::MutexLock lock(&mutex_);
  const absl::Time now = clock_.Now();
  std::vector<int> usable, possible;
  for (size_t a = 0; a < addresses_.size(); ++a) {
    if (IsUsable(addresses_[a], now)) usable.push_back(static_cast<int>(a));
    if (!addresses_[a].gone) possible.push_back(static_cast<int>(a));
  }
  return usable.empty() ? possible : usable;
}

int Connections::count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(absl::c_count_if(slots_, [](const Slot& slot) { return !slot.spare; }));
}

bool Connections::ReportUnavailable(int address_index, absl::Time begun) {
  int name = -1;
  {
    absl::MutexLock lock(&mutex_);
    Address& address = addresses_[address_index];
    absl::Time now = clock_.Now();
    if (begun < address.reported_at) return false;
    address.reported_at = now;
    absl::Duration pause = kFirstSuspension * (1 << std::min(address.failures, 6));
    address.suspended_until = now + std::min(pause, kLongestSuspension);
    ++address.failures;
    if (address.name >= 0 && now >= names_[address.name].look_up_after) {
      names_[address.name].look_up_after = now + kLookUpAgain;
      name = address.name;
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
    Follow(name, all, left);
  }
  for (const std::shared_ptr<Connection>& connection : left) connection->RetireUnlessConnected();
}

void Connections::Follow(int name, const std::vector<std::string>& all,
                         std::vector<std::shared_ptr<Connection>>& left) {
  const auto others = static_cast<size_t>(
      absl::c_count_if(addresses_, [&](const Address& a) { return a.name != name; }));
  const std::vector<std::string> found =
      Kept(all, others < kMaxAddresses ? kMaxAddresses - others : 1);
  for (Address& address : addresses_) {
    if (address.name == name) address.gone = !absl::c_linear_search(found, address.target);
  }
  for (const std::string& target : found) {
    bool used = absl::c_any_of(addresses_, [&](const Address& a) { return a.target == target; });
    if (!used) Place(name, target, left);
  }
}

// In the place of one that is gone, where what runs on its connections goes on: the replica may be
// about to finish it. Else behind the others.
void Connections::Place(int name, const std::string& target,
                        std::vector<std::shared_ptr<Connection>>& left) {
  auto place =
      absl::c_find_if(addresses_, [&](const Address& a) { return a.name == name && a.gone; });
  const auto index = static_cast<int>(place - addresses_.begin());
  if (place != addresses_.end()) {
    *place = {.target = target, .name = name};  // not silent, as the one before may have been
    for (Slot& slot : slots_) {
      if (slot.connection->address_index() != index) continue;
      left.push_back(std::move(slot.connection));
      slot = {Open(index, slot.spare), slot.spare};
    }
  } else if (addresses_.size() < kMaxAddresses) {
    addresses_.push_back({.target = target, .name = name});
    AddSlots(index);
    FitSlots();
  }
}

absl::Status Connections::NameProxy(absl::Status status) const {
  if (absl::IsUnavailable(status) && !DetailOf(status).has_value()) {
    absl::MutexLock lock(&mutex_);
    if (absl::c_all_of(addresses_, [](const Address& a) { return a.gone; })) {
      return WithReason(absl::UnavailableError(absl::StrCat(
                            "no daemon's address at ", absl::StrJoin(options_.addresses, ", "))),
                        "NO_ADDRESS");
    }
  }
  if (status.ok() || proxy_.url.empty() || DetailOf(status).has_value()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), "; through the proxy ", proxy_.shown));
}

absl::Status Connections::StatusOf(const Connection& connection, absl::Status status,
                                   bool by_caller) const {
  status = NameProxy(std::move(status));
  if (absl::IsCancelled(status) && connection.retired()) {
    return absl::UnavailableError("the connection was closed because its peer did not answer");
  }
  return UnavailableIfCancelled(status, by_caller);
}

std::string Connections::target(int address_index) {
  absl::MutexLock lock(&mutex_);
  return addresses_[address_index].target;
}

void Connections::ReportAlive(int address_index) {
  absl::MutexLock lock(&mutex_);
  addresses_[address_index].failures = 0;
  addresses_[address_index].suspended_until = absl::InfinitePast();
  addresses_[address_index].heard_at = clock_.Now();
  addresses_[address_index].silent = false;
}

// Without news the queue is over when it should have been worked off.
void Connections::ReportQueue(int address_index, absl::Duration queue) {
  constexpr absl::Duration kLongestQueue = absl::Seconds(5);
  absl::MutexLock lock(&mutex_);
  addresses_[address_index].queue_ends = clock_.Now() + std::min(queue, kLongestQueue);
}

void Connections::ReportModules(int address_index, const ReportedLoad& load) {
  absl::MutexLock lock(&mutex_);
  addresses_[address_index].modules = load;
}

std::optional<ReportedLoad> Connections::modules_of(int address_index) const {
  absl::MutexLock lock(&mutex_);
  return addresses_[address_index].modules;
}

// A slow call tells little, since it may have computed or waited for long: the rate falls slowly.
void Connections::ReportMoved(int64_t bytes, absl::Duration took) {
  if (bytes < kSmallCallBytes || took <= absl::ZeroDuration()) return;
  absl::MutexLock lock(&mutex_);
  rate_ = std::max(0.9 * rate_, static_cast<double>(bytes) / absl::ToDoubleSeconds(took));
}

bool Connections::HasOther(int address_index, absl::Time now) const {
  for (size_t a = 0; a < addresses_.size(); ++a) {
    if (static_cast<int>(a) != address_index && IsUsable(addresses_[a], now)) return true;
  }
  return false;
}

void Connections::Suspect(int address_index, absl::Time silent_since) {
  bool gone;
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_.Now();
    if (!HasOther(address_index, now)) return;
    gone = addresses_[address_index].gone;
    int64_t bytes = 0;
    for (const Slot& slot : slots_) {
      if (slot.connection->address_index() == address_index) bytes += slot.outstanding_bytes;
    }
    const absl::Duration most =
        std::max(kSilence, absl::Seconds(3 * static_cast<double>(bytes) / rate_));
    if (now - std::max(silent_since, addresses_[address_index].heard_at) < most) return;
  }
  gone ? LeaveGone(address_index) : prober_.Ask(address_index);
}

void Connections::LeaveGone(int address_index) {
  constexpr size_t kAll = std::numeric_limits<size_t>::max();
  for (const std::shared_ptr<Connection>& connection : FirstOf(address_index, kAll)) {
    if (connection->channel()->GetState(false) != GRPC_CHANNEL_READY) Replace(connection);
  }
}

// That of small calls: on the others an answer could wait for megabytes.
std::shared_ptr<grpc::Channel> Connections::ChannelToProbe(int address_index) {
  absl::MutexLock lock(&mutex_);
  if (addresses_[address_index].gone) return nullptr;
  for (const Slot& slot : slots_) {
    if (slot.connection->address_index() == address_index && slot.spare) {
      return slot.connection->channel();
    }
  }
  return nullptr;
}

// Without another address calls stay where they are: keepalive ends them if nothing comes.
void Connections::Probed(int address_index, bool answers) {
  std::vector<std::shared_ptr<Connection>> stuck;
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_.Now();
    Address& address = addresses_[address_index];
    if (answers) address.heard_at = now;
    const bool news = std::exchange(address.silent, !answers) == answers;
    if (answers) return;
    if (!HasOther(address_index, now)) return;
    address.reported_at = now;  // its calls' failures are this one
    for (const Slot& slot : slots_) {
      if (slot.connection->address_index() == address_index &&
          (news || slot.outstanding_bytes > 0)) {
        stuck.push_back(slot.connection);
      }
    }
  }
  for (const std::shared_ptr<Connection>& connection : stuck) Replace(connection);
}

void Connections::Replace(const std::shared_ptr<Connection>& stuck) {
  {
    absl::MutexLock lock(&mutex_);
    for (Slot& slot : slots_) {
      if (slot.connection == stuck) {
        slot = {Open(stuck->address_index(), slot.spare), slot.spare};
      }
    }
  }
  stuck->Retire();
}

std::shared_ptr<Connection> Connections::Of(int address_index) {
  return FirstOf(address_index, 1).front();
}

std::vector<std::shared_ptr<Connection>> Connections::FirstOf(int address_index, size_t most) {
  std::vector<std::shared_ptr<Connection>> found;
  absl::MutexLock lock(&mutex_);
  for (const Slot& slot : slots_) {
    const bool is_there = slot.connection->address_index() == address_index;
    if (is_there && found.size() < most) found.push_back(slot.connection);
  }
  CHECK(!found.empty()) << "no connection to address " << address_index;
  return found;
}

}  // namespace attnd
