// Picker: which of a client's connections a call takes, and which addresses the client has. It
// knows what calls, servers and names have told, and connections by number alone: Connections opens
// them, and a fleet of clients can be simulated without any.
//
// A call goes to the address where it should be finished first: by the queue that the server has
// told of, by the client's outstanding bytes, and by the time that bytes have taken there, away
// from addresses that it has tried or that have just been unavailable. There it takes the
// connection with the fewest outstanding bytes. What a server has told becomes old: its queue is
// worked off, and others send it calls. With thousands of clients it is always old, so while there
// are queues a call first asks three addresses at random (ToAsk).
//
// It keeps at most kMaxAddresses, those with the highest hash of address and client (rendezvous
// hashing): each client has its own, and keeps them while others come and go. New ones join or take
// the place of those that their name has no more, which come last until then; of those with modules
// of late only where there is no other room, as these are yet to be taken elsewhere. An address's
// index never changes its name.
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "client/channels/reported_load.h"

namespace attnd {

// An address that the client has, or has had: unlike its index, never used again.
enum class AddressId : uint64_t {};

class Picker {
 public:
  static constexpr int64_t kSmallCallBytes = int64_t{256} << 10;
  static constexpr int kMaxAddresses = 16;
  static constexpr int kMaxConnections = 32;
  // A call without progress for so long, or for three times what its bytes should take, is
  // suspected.
  static constexpr absl::Duration kSilence = absl::Milliseconds(1500);

  // One connection.
  struct Slot {
    uint64_t id = 0;  // never used again
    int address = 0;
    bool spare = false;  // for small calls alone
    int64_t outstanding_bytes = 0;
  };

  // `clock` outlives it. `client`: random, of this client alone.
  Picker(const Clock& clock, int channels_per_address, uint64_t client);

  // An address that the client was given. `name`: the number of the name that has it; −1: none.
  // `gone`: it stands for a name that has none yet.
  void Add(std::string target, int name = -1, bool gone = false);
  // After the last Add: keeps some of the addresses, and makes their connections.
  void Begin();
  // The name has these addresses now. Gives the connections to addresses whose place another has
  // taken; idle ones may be gone too, and others have come.
  std::vector<uint64_t> Follow(int name, const std::vector<std::string>& all);

  // The best connection for `bytes` more bytes; Release gives them back. `tried[a]`: the shard has
  // been at address a. `only`: the address that it must go to, −1: any.
  const Slot& Pick(int64_t bytes, const std::vector<bool>& tried, int only = -1);
  void Release(uint64_t slot, int64_t bytes);

  // Addresses whose queue is worth asking for before so many calls, and for how long to wait for
  // answers; none where they would tell nothing new, or queues are no longer than asking takes.
  std::vector<int> ToAsk(int calls);
  absl::Duration asking_patience() const;
  // It took so long.
  void Asked(absl::Duration took);

  // Another connection is in the place of this one; false when it is gone.
  bool Renew(uint64_t slot);

  // The address was unavailable for a call begun at `begun`: others come first for a while, longer
  // each time in a row. False when the call began before the failure that was reported last: it is
  // the same one.
  bool ReportUnavailable(int address, absl::Time begun);
  void ReportAlive(int address);
  // A call of so many bytes took so long.
  void ReportMoved(int address, int64_t bytes, absl::Duration took);
  // The server told of so much work before a further call.
  void ReportQueue(int address, absl::Duration queue);
  // The server told so of its modules.
  void ReportModules(int address, const ReportedLoad& load);

  // A call has made no progress since then: whether to ask the server if it answers at all. Not
  // where the call may be silent for longer, or there is no other address.
  bool Suspects(AddressId address, absl::Time silent_since) const;
  // The server has answered, or has not: the connections to give up.
  std::vector<uint64_t> Probed(AddressId address, bool answers);

  const std::vector<Slot>& slots() const { return slots_; }
  int address_count() const { return static_cast<int>(addresses_.size()); }  // may grow
  const std::string& target(int address) const { return addresses_[address].target; }
  int name(int address) const { return addresses_[address].name; }
  AddressId id(int address) const { return addresses_[address].id; }
  // Nothing: another has taken its place.
  std::optional<int> index_of(AddressId address) const;
  bool is_gone(int address) const { return addresses_[address].gone; }
  bool is_silent(int address) const { return addresses_[address].silent; }
  bool all_gone() const;
  const std::optional<ReportedLoad>& modules_of(int address) const {
    return addresses_[address].modules;
  }
  // Those that can be expected to answer; where there are none, those that their names have still.
  std::vector<int> usable_addresses() const;

 private:
  struct Moved {
    double bytes = 0, seconds = 0;
  };
  struct Address {
    AddressId id{};
    std::string target;
    int name = -1;
    absl::Time reported_at = absl::InfinitePast();
    absl::Time suspended_until = absl::InfinitePast();
    absl::Time heard_at = absl::InfinitePast();    // a call succeeded, or the prober had an answer
    absl::Time told_at = absl::InfinitePast();     // of its queue
    absl::Time queue_ends = absl::InfinitePast();  // of what it told then
    Moved moved;                                   // of its calls, sums that fade
    bool gone = false;                             // its name has it no more
    bool silent = false;                           // the prober got no answer
    std::optional<ReportedLoad> modules;           // as the server has told
    absl::Time modules_at = absl::InfinitePast();  // then
    int failures = 0;                              // in a row
    uint64_t last_picked = 0;                      // sequence number
  };

  // In how many seconds the address should be done with `bytes` more, beside `outstanding` ones.
  double FinishAt(const Address& address, int64_t bytes, int64_t outstanding, absl::Time now) const;
  double BytesPerSecond(const Address& address) const;
  bool HasQueues() const;
  AddressId NewId() { return static_cast<AddressId>(++last_address_); }
  uint64_t Rank(const std::string& target) const;
  std::vector<std::string> Kept(std::vector<std::string> targets, size_t most) const;
  void Place(int name, const std::string& target, std::vector<uint64_t>& left);
  int ConnectionsPerAddress() const;  // without the spare one
  void AddSlots(int address);
  void FitSlots();
  // Whether some address but this one can be expected to answer.
  bool HasOther(int address, absl::Time now) const;
  bool IsUsable(const Address& address, absl::Time now) const {
    return !address.gone && !address.silent && address.suspended_until <= now;
  }

  const Clock& clock_;
  const int channels_per_address_;
  const uint64_t client_;
  std::mt19937_64 random_;
  std::vector<Address> addresses_;
  std::vector<Slot> slots_;
  uint64_t last_slot_ = 0, last_address_ = 0;
  uint64_t picks_ = uint64_t{1} << 32;  // after the first ones' random order
  // Bytes a second that the fastest calls move, by which Suspect is patient. Until a call has been
  // seen, rates are those of a link of 100 Mbit/s.
  double rate_ = 12.5e6;
  Moved usual_ = {.bytes = 125e3, .seconds = 0.01};  // of a call
  double usual_queue_ = 0;                           // seconds, of all that servers have told
  absl::Time ask_after_ = absl::InfinitePast();
};

}  // namespace attnd
