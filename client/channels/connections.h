// Connections: the client's gRPC channels, several to each address, each with a TCP connection of
// its own (one connection is worth about one core). A shard goes to the connection on which it
// should be finished first, by its outstanding bytes and by the queue that the server told of in
// its last answer, away from addresses that it has tried or that have just been unavailable. Each
// address has one more for small calls, which would wait behind megabytes on all others; gRPC opens
// it when first used.
//
// A name (replica_names.h) stands for all addresses that it has. It is looked up every half minute,
// files every 2 s, and when one of them is unavailable: new ones join or take the place of those
// that the name has no more, which come last until then. An address's index never changes its name.
// A call that waits for a connection (wait_for_ready) to an address that is gone goes elsewhere.
//
// Of more than kMaxAddresses the client keeps those with the highest hash of address and client
// (rendezvous hashing): each client has its own, and keeps them while others come and go. All
// connections to several addresses are at most kMaxConnections.
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
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "client/channels/grpc_status.h"
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
  Connection(std::shared_ptr<grpc::Channel> channel, int address_index)
      : channel_(std::move(channel)), address_index_(address_index) {}

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  int address_index() const { return address_index_; }

  void Enter(grpc::ClientContext* context);  // cancels it at once when retired
  void Leave(grpc::ClientContext* context);
  void Retire();  // ends every call on it with CANCELLED
  // Its address is gone. Calls that are at the server may finish there; those that wait for a
  // connection, and later ones, end with CANCELLED.
  void RetireUnlessConnected();
  bool retired() const;

 private:
  const std::shared_ptr<grpc::Channel> channel_;
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
  // UNAVAILABLE unless its caller cancelled it: the connection was retired, or the server stops.
  absl::Status StatusOf(const Connection& connection, absl::Status status, bool by_caller) const;

  static constexpr int64_t kSmallCallBytes = int64_t{256} << 10;
  static constexpr int kMaxAddresses = 16;
  static constexpr int kMaxConnections = 32;
  // TCP ends a connection whose peer has taken nothing for so long.
  static constexpr absl::Duration kWriteTimeout = absl::Seconds(5);
  // A call without progress for so long, or for three times what its bytes should take, is
  // suspected.
  static constexpr absl::Duration kSilence = absl::Milliseconds(1500);

  // The best connection for `bytes` more bytes; Release gives them back. `tried[a]`: the shard has
  // been at address a. `only`: the address that it must go to, -1: any.
  std::shared_ptr<Connection> Acquire(int64_t bytes, const std::vector<bool>& tried, int only = -1);
  void Release(const Connection& connection, int64_t bytes);

  // The address was unavailable for a call begun at `begun`: others come first for a while, longer
  // each time in a row. False when the call began before the failure that was reported last: it is
  // the same one.
  bool ReportUnavailable(int address_index, absl::Time begun);
  void ReportAlive(int address_index);
  // A call of so many bytes took so long: the rate by which Suspect is patient.
  void ReportMoved(int64_t bytes, absl::Duration took);
  // The server told of so much work before a further call.
  void ReportQueue(int address_index, absl::Duration queue);
  // The server told so of its modules; the last such report, or nothing.
  void ReportModules(int address_index, const ReportedLoad& load);
  std::optional<ReportedLoad> modules_of(int address_index) const;
  // A call there has made no progress since then. Asks the server whether it answers, where that is
  // longer than a call may be silent and there is another address. Returns at once.
  void Suspect(int address_index, absl::Time silent_since);

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
  int address_count() const;  // may grow
  // Those that can be expected to answer; where there are none, those that their names have still.
  std::vector<int> usable_addresses() const;
  int count() const;       // likewise; without those for small calls
  int idle_count() const;  // of these, without outstanding bytes

  // Looks all names up now.
  void LookUpNames();

 private:
  struct Address {
    std::string target;
    int name = -1;  // index into names_; −1: as it was given
    absl::Time reported_at = absl::InfinitePast();
    absl::Time suspended_until = absl::InfinitePast();
    absl::Time heard_at = absl::InfinitePast();    // a call succeeded, or the prober had an answer
    absl::Time queue_ends = absl::InfinitePast();  // of what the server has told of
    bool gone = false;                             // its name has it no more
    bool silent = false;                           // the prober got no answer
    std::optional<ReportedLoad> modules;           // as the server has told
    int failures = 0;                              // in a row
    uint64_t last_picked = 0;                      // sequence number
  };
  struct Name {
    ReplicaName name;
    absl::Time look_up_after = absl::InfinitePast();  // after a failure
    absl::Time due = absl::InfinitePast();            // without one
  };
  struct Slot {
    std::shared_ptr<Connection> connection;
    bool spare = false;  // for small calls alone
    int64_t outstanding_bytes = 0;
  };

  Connections(const ClientOptions& options, std::shared_ptr<grpc::ChannelCredentials> credentials,
              Proxy proxy, const Clock& clock, ReplicaLookup lookup);
  absl::Status NameProxy(absl::Status status) const;
  void AddAddress(const std::string& address);
  void KeepMostAddresses();
  std::vector<std::string> Kept(std::vector<std::string> targets, size_t most) const;
  uint64_t Rank(const std::string& target) const;
  int ConnectionsPerAddress() const;  // without the spare one
  void FitSlots();
  void AddSlots(int address_index);
  std::shared_ptr<Connection> Open(int address_index, bool spare) const;
  // The name has these addresses now.
  void Update(int name, const std::vector<std::string>& all);
  // Both add the connections to addresses whose place another has taken to `left`.
  void Follow(int name, const std::vector<std::string>& all,
              std::vector<std::shared_ptr<Connection>>& left)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Place(int name, const std::string& target, std::vector<std::shared_ptr<Connection>>& left)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WatchNames();
  std::shared_ptr<grpc::Channel> ChannelToProbe(int address_index);
  void Probed(int address_index, bool answers);
  // Lets calls that wait for a connection to an address that is gone go to another.
  void LeaveGone(int address_index);
  // Whether some address but this one can be expected to answer.
  bool HasOther(int address_index, absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsUsable(const Address& address, absl::Time now) const {
    return !address.gone && !address.silent && address.suspended_until <= now;
  }

  const ClientOptions options_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  const Proxy proxy_;
  const Clock& clock_;
  mutable absl::Mutex mutex_;
  const ReplicaLookup lookup_;
  const uint64_t client_;    // random
  std::vector<Name> names_;  // its names never change; the rest ABSL_GUARDED_BY(mutex_)
  // Guarded by mutex_ once Create has returned.
  std::vector<Address> addresses_;
  std::vector<Slot> slots_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t picks_ ABSL_GUARDED_BY(mutex_) = uint64_t{1}
                                            << 32;  // after the first ones' random order
  // Bytes a second that calls move; until one has been seen, those of a link of 100 Mbit/s.
  double rate_ ABSL_GUARDED_BY(mutex_) = 12.5e6;
  Reconnector reconnector_;
  std::thread watch_;  // of names, where there are any
  Prober prober_;      // last: its thread uses the rest
};

}  // namespace attnd
