// Connections: the client's gRPC channels, several to each address, each with a TCP connection of
// its own (one connection is worth about one core). A shard goes to the one that the picker
// (picker.h) says, which also says which addresses there are. Each address has one more for small
// calls, which would wait behind megabytes on all others; gRPC opens it when first used.
//
// A name (replica_names.h) stands for all addresses that it has. It is looked up every half minute,
// files every 2 s, and when one of them is unavailable. A call that waits for a connection
// (wait_for_ready) to an address that is gone goes elsewhere.
//
// A call that makes no progress is suspected (Suspect), where there is another address to go to:
// the server is asked whether it answers at all. One that does not gets no calls until it does, and
// those that are with it end, to be tried elsewhere.
//
// Threads: any.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/periodic.h"
#include "client/channels/picker.h"
#include "client/channels/prober.h"
#include "client/channels/proxy.h"
#include "client/channels/reconnector.h"
#include "client/channels/replica_names.h"
#include "client/types/client_options.h"

namespace attnd {

// Connection: one channel and the calls that run on it. shared_ptr: the pool owns it, and each
// attempt keeps it until the attempt's slices are back.
class Connection {
 public:
  Connection(std::shared_ptr<grpc::Channel> channel, const Picker::Slot& slot, AddressId address)
      : channel_(std::move(channel)),
        slot_(slot.id),
        address_(address),
        address_index_(slot.address) {}

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  uint64_t slot() const { return slot_; }  // the picker's
  int address_index() const { return address_index_; }
  AddressId address() const { return address_; }

  void Enter(grpc::ClientContext* context);  // cancels it at once when retired
  void Leave(grpc::ClientContext* context);
  void Retire();  // ends every call on it with CANCELLED
  // Its address is gone. Calls that are at the server may finish there; those that wait for a
  // connection, and later ones, end with CANCELLED.
  void RetireUnlessConnected();
  bool retired() const;

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  const uint64_t slot_;
  const AddressId address_;
  const int address_index_;
  mutable absl::Mutex mutex_;
  std::set<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);
  bool retired_ ABSL_GUARDED_BY(mutex_) = false;
};

class Connections {
 public:
  // Checks the options and reads the TLS files; INVALID_ARGUMENT or NOT_FOUND naming the option.
  // `clock` outlives it.
  static absl::StatusOr<std::unique_ptr<Connections>> Create(const ClientOptions& options,
                                                             const Clock& clock,
                                                             ReplicaLookup lookup = LookUpReplicas);
  ~Connections();

  // Gives the status of a call that has ended on the connection. Where the proxy may be to blame
  // its message says through which it went, and where a name has no address, that. CANCELLED is
  // UNAVAILABLE unless its caller cancelled it: the connection was retired, or the server stops. So
  // is UNKNOWN where the connection ended.
  absl::Status StatusOf(const Connection& connection, absl::Status status, bool by_caller) const;

  // TCP ends a connection whose peer has taken nothing for so long.
  static constexpr absl::Duration kWriteTimeout = absl::Seconds(5);

  // The picker's, of the same names.
  std::shared_ptr<Connection> Acquire(int64_t bytes, const std::vector<bool>& tried, int only = -1);
  void Release(const Connection& connection, int64_t bytes);
  bool ReportUnavailable(int address_index, absl::Time begun);
  void ReportAlive(int address_index);
  void ReportMoved(int address_index, int64_t bytes, absl::Duration took);
  void ReportQueue(int address_index, absl::Duration queue);
  void ReportModules(int address_index, const ReportedLoad& load);
  std::optional<ReportedLoad> modules_of(int address_index) const;
  // A call on the connection has made no progress since then. Asks the server whether it answers,
  // where that is longer than a call may be silent and there is another address. Returns at once.
  void Suspect(const std::shared_ptr<Connection>& connection, absl::Time silent_since);

  // Over which to ask for queues, those for small calls.
  std::vector<std::shared_ptr<Connection>> ToAsk(int calls);
  absl::Duration asking_patience() const;
  void Asked(absl::Duration took);

  // Sees to it that a connection that has lost its server finds it again, calls or not.
  void Reconnect(const Connection& lost) { reconnector_.Drive(lost.channel()); }

  // Puts a fresh connection in the place of one whose peer no longer reads, and retires that. gRPC
  // closes its socket when TCP gives up the write that hangs (kWriteTimeout).
  void Replace(const std::shared_ptr<Connection>& stuck);

  // The first connection of an address, for small calls about it, or the first few.
  std::shared_ptr<Connection> Of(int address_index);
  std::vector<std::shared_ptr<Connection>> FirstOf(int address_index, size_t most);

  // All that may be called.
  bool on_this_host() const;
  std::string target(int address_index);
  int address_count() const;             // may grow
  bool IsGone(int address_index) const;  // its name has it no more
  // Those that can be expected to answer; where there are none, those that their names have still.
  std::vector<int> usable_addresses() const;
  int count() const;       // likewise; without those for small calls
  int idle_count() const;  // of these, without outstanding bytes

  // Looks all names up now.
  void LookUpNames();

 private:
  struct Name {
    ReplicaName name;
    absl::Time look_up_after = absl::InfinitePast();  // after a failure
    absl::Time due = absl::InfinitePast();            // without one
  };

  Connections(const ClientOptions& options, std::shared_ptr<grpc::ChannelCredentials> credentials,
              Proxy proxy, const Clock& clock, ReplicaLookup lookup);
  bool HasNoAddress() const;
  absl::Status NameProxy(absl::Status status) const;
  void AddAddress(const std::string& address);
  // Opens and drops connections, so that they are the picker's.
  void Fit();
  std::shared_ptr<Connection> Open(const Picker::Slot& slot) const;
  // The name has these addresses now.
  void Update(int name, const std::vector<std::string>& all);
  void WatchNames();
  // For small calls: on the others an answer could wait for megabytes.
  std::shared_ptr<Connection> SpareOf(int address_index) ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Null: nothing is with that address any more.
  std::shared_ptr<grpc::Channel> ChannelToProbe(AddressId address);
  void Probed(AddressId address, bool answers);

  const ClientOptions options_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  const Proxy proxy_;
  const Clock& clock_;
  mutable absl::Mutex mutex_;
  const ReplicaLookup lookup_;
  std::vector<Name> names_;  // its names never change; the rest ABSL_GUARDED_BY(mutex_)
  // Guarded by mutex_ once Create has returned.
  Picker picker_;
  std::map<uint64_t, std::shared_ptr<Connection>> connections_;  // by the picker's slots
  // To addresses whose place others have taken; calls may have them yet.
  std::vector<std::weak_ptr<Connection>> left_ ABSL_GUARDED_BY(mutex_);
  Reconnector reconnector_;
  std::optional<Periodic> watch_;  // of names, where there are any
  Prober prober_;                  // last: its thread uses the rest
};

}  // namespace attnd
