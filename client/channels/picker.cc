#include "client/channels/picker.h"

#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/random/distributions.h"
#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

constexpr absl::Duration kFirstSuspension = absl::Milliseconds(100);
constexpr absl::Duration kLongestSuspension = absl::Seconds(5);
// In which modules leave a server that drains: longer than a drain by default.
constexpr absl::Duration kLeaving = absl::Minutes(2);

// With these numbers a simulated fleet came nearest to an ideal one (fleet_simulation_test.cc).
// An address of which nothing new is known counts as worse than usual, since it may be much worse.
constexpr double kUnknownQueue = 2;  // of the usual one
// All of a call's own time would leave slow servers idle while fast ones queue. Where there are no
// queues it does not count, and addresses take turns.
constexpr double kOwnTime = 0.5;
constexpr double kFades = 0.99;  // an address's sums, with each call of the client
constexpr double kGain = 0.2;    // of usual values, with each call

constexpr int kAskedForACall = 3;
constexpr double kShortQueue = 0.001;  // seconds; asking takes some 0.3 ms in a network
constexpr int kPauseAfterAsking = 9;   // times as long as it took: a tenth of the time at most
constexpr absl::Duration kLeastPatience = absl::Milliseconds(5);

}  // namespace

Picker::Picker(const Clock& clock, int channels_per_address, uint64_t client)
    : clock_(clock),
      channels_per_address_(channels_per_address),
      client_(client),
      random_(client) {}

void Picker::Add(std::string target, int name, bool gone) {
  addresses_.push_back({.id = NewId(), .target = std::move(target), .name = name, .gone = gone});
}

void Picker::Begin() {
  std::vector<std::string> targets;
  for (const Address& address : addresses_) targets.push_back(address.target);
  targets = Kept(std::move(targets), kMaxAddresses);
  std::erase_if(addresses_, [&](const Address& address) {
    return !absl::c_linear_search(targets, address.target);
  });
  if (addresses_.size() > kMaxAddresses) addresses_.resize(kMaxAddresses);  // some twice
  for (Address& address : addresses_) address.last_picked = absl::Uniform<uint32_t>(random_);
  for (int address = 0; address < address_count(); ++address) AddSlots(address);
}

uint64_t Picker::Rank(const std::string& target) const {
  return std::hash<std::string>()(absl::StrCat(client_, " ", target));
}

std::vector<std::string> Picker::Kept(std::vector<std::string> targets, size_t most) const {
  if (targets.size() <= most) return targets;
  std::vector<uint64_t> ranks;
  for (const std::string& target : targets) ranks.push_back(Rank(target));
  std::vector<uint64_t> sorted = ranks;
  const auto last = sorted.begin() + static_cast<ptrdiff_t>(most) - 1;
  std::nth_element(sorted.begin(), last, sorted.end(), std::greater<>());
  std::vector<std::string> kept;
  for (size_t n = 0; n < targets.size(); ++n) {
    if (ranks[n] >= *last) kept.push_back(std::move(targets[n]));
  }
  return kept;
}

void Picker::AddSlots(int address) {
  for (int n = 0; n < ConnectionsPerAddress(); ++n) {
    slots_.push_back({.id = ++last_slot_, .address = address});
  }
  slots_.push_back({.id = ++last_slot_, .address = address, .spare = true});
}

int Picker::ConnectionsPerAddress() const {
  if (address_count() == 1) return channels_per_address_;
  return std::clamp(kMaxConnections / address_count() - 1, 1, channels_per_address_);
}

// Closes what is too much since addresses have joined, as far as nothing runs on it.
void Picker::FitSlots() {
  std::vector<int> count(addresses_.size(), 0);
  std::erase_if(slots_, [&](const Slot& slot) {
    if (slot.spare || count[slot.address] < ConnectionsPerAddress()) {
      if (!slot.spare) ++count[slot.address];
      return false;
    }
    return slot.outstanding_bytes == 0;
  });
}

std::vector<uint64_t> Picker::Follow(int name, const std::vector<std::string>& all) {
  const auto others = static_cast<size_t>(
      absl::c_count_if(addresses_, [&](const Address& a) { return a.name != name; }));
  const std::vector<std::string> found =
      Kept(all, others < kMaxAddresses ? kMaxAddresses - others : 1);
  for (Address& address : addresses_) {
    if (address.name == name) address.gone = !absl::c_linear_search(found, address.target);
  }
  std::vector<uint64_t> left;
  for (const std::string& target : found) {
    bool used = absl::c_any_of(addresses_, [&](const Address& a) { return a.target == target; });
    if (!used) Place(name, target, left);
  }
  return left;
}

// In the place of one that is gone, where what runs on its connections goes on: the replica may be
// about to finish it. Else behind the others.
void Picker::Place(int name, const std::string& target, std::vector<uint64_t>& left) {
  const bool has_room = address_count() < kMaxAddresses;
  const absl::Time left_long_ago = clock_.Now() - kLeaving;
  auto place = absl::c_find_if(addresses_, [&](const Address& a) {
    return a.name == name && a.gone && !(has_room && a.modules_at > left_long_ago);
  });
  const auto index = static_cast<int>(place - addresses_.begin());
  if (place != addresses_.end()) {
    *place = {.id = NewId(),
              .target = target,
              .name = name};  // not silent, as the one before may have been
    for (Slot& slot : slots_) {
      if (slot.address != index) continue;
      left.push_back(slot.id);
      slot = {.id = ++last_slot_, .address = index, .spare = slot.spare};
    }
  } else if (has_room) {
    Add(target, name);
    AddSlots(index);
    FitSlots();
  }
}

bool Picker::HasQueues() const { return usual_queue_ >= kShortQueue; }

double Picker::BytesPerSecond(const Address& address) const {
  return (address.moved.bytes + usual_.bytes) / (address.moved.seconds + usual_.seconds);
}

double Picker::FinishAt(const Address& address, int64_t bytes, int64_t outstanding,
                        absl::Time now) const {
  const double left = absl::ToDoubleSeconds(address.queue_ends - now);
  const double age = absl::ToDoubleSeconds(now - address.told_at);
  const double own = HasQueues() ? kOwnTime * static_cast<double>(bytes) : 0;
  return std::max(left, kUnknownQueue * std::min(age, usual_queue_)) +
         (static_cast<double>(outstanding) + own) / BytesPerSecond(address);
}

const Picker::Slot& Picker::Pick(int64_t bytes, const std::vector<bool>& tried, int only) {
  const absl::Time now = clock_.Now();
  std::vector<int64_t> outstanding(addresses_.size(), 0);
  for (const Slot& slot : slots_) outstanding[slot.address] += slot.outstanding_bytes;
  std::vector<double> finish;
  for (size_t a = 0; a < addresses_.size(); ++a) {
    finish.push_back(FinishAt(addresses_[a], bytes, outstanding[a], now));
  }
  auto rank = [&](const Slot& slot) {
    const int a = slot.address;
    bool was_there = a < static_cast<int>(tried.size()) && tried[a];
    return std::make_tuple(slot.spare && bytes > kSmallCallBytes, only >= 0 && a != only, was_there,
                           addresses_[a].gone, !IsUsable(addresses_[a], now), finish[a],
                           slot.outstanding_bytes, slot.spare, addresses_[a].last_picked);
  };
  Slot& best = *std::min_element(slots_.begin(), slots_.end(),
                                 [&](const Slot& x, const Slot& y) { return rank(x) < rank(y); });
  best.outstanding_bytes += bytes;
  addresses_[best.address].last_picked = ++picks_;
  return best;
}

void Picker::Release(uint64_t slot, int64_t bytes) {
  for (Slot& one : slots_) {
    if (one.id == slot) one.outstanding_bytes -= bytes;
  }
}

std::vector<int> Picker::ToAsk(int calls) {
  const absl::Time now = clock_.Now();
  std::vector<int> old;
  if (!HasQueues() || now < ask_after_ || address_count() == 1) return old;
  for (int a : usable_addresses()) {
    if (absl::ToDoubleSeconds(now - addresses_[a].told_at) > usual_queue_) old.push_back(a);
  }
  std::shuffle(old.begin(), old.end(), random_);
  old.resize(std::min(old.size(), static_cast<size_t>(kAskedForACall) * calls));
  return old;
}

absl::Duration Picker::asking_patience() const {
  return std::max(kLeastPatience, absl::Seconds(usual_queue_));
}

void Picker::Asked(absl::Duration took) { ask_after_ = clock_.Now() + kPauseAfterAsking * took; }

bool Picker::Renew(uint64_t slot) {
  for (Slot& one : slots_) {
    if (one.id != slot) continue;
    one = {.id = ++last_slot_, .address = one.address, .spare = one.spare};
    return true;
  }
  return false;
}

bool Picker::ReportUnavailable(int address_index, absl::Time begun) {
  Address& address = addresses_[address_index];
  const absl::Time now = clock_.Now();
  if (begun < address.reported_at) return false;
  address.reported_at = now;
  absl::Duration pause = kFirstSuspension * (1 << std::min(address.failures, 6));
  address.suspended_until = now + std::min(pause, kLongestSuspension);
  ++address.failures;
  return true;
}

void Picker::ReportAlive(int address) {
  addresses_[address].failures = 0;
  addresses_[address].suspended_until = absl::InfinitePast();
  addresses_[address].heard_at = clock_.Now();
  addresses_[address].silent = false;
}

// A slow call tells little, since it may have computed or waited for long: the rate falls slowly.
void Picker::ReportMoved(int address, int64_t bytes, absl::Duration took) {
  if (bytes < kSmallCallBytes || took <= absl::ZeroDuration()) return;
  const double seconds = absl::ToDoubleSeconds(took);
  for (Address& one : addresses_) {
    one.moved.bytes *= kFades;
    one.moved.seconds *= kFades;
  }
  addresses_[address].moved.bytes += static_cast<double>(bytes);
  addresses_[address].moved.seconds += seconds;
  usual_.bytes += kGain * (static_cast<double>(bytes) - usual_.bytes);
  usual_.seconds += kGain * (seconds - usual_.seconds);
  rate_ = std::max(0.9 * rate_, static_cast<double>(bytes) / seconds);
}

void Picker::ReportQueue(int address, absl::Duration queue) {
  constexpr absl::Duration kLongestQueue = absl::Seconds(5);
  const absl::Duration told = std::min(queue, kLongestQueue);
  addresses_[address].told_at = clock_.Now();
  addresses_[address].queue_ends = clock_.Now() + told;
  usual_queue_ += kGain * (absl::ToDoubleSeconds(told) - usual_queue_);
}

void Picker::ReportModules(int address, const ReportedLoad& load) {
  addresses_[address].modules = load;
  addresses_[address].modules_at = clock_.Now();
}

bool Picker::HasOther(int address, absl::Time now) const {
  for (int a = 0; a < address_count(); ++a) {
    if (a != address && IsUsable(addresses_[a], now)) return true;
  }
  return false;
}

std::optional<int> Picker::index_of(AddressId id) const {
  const auto found = absl::c_find_if(addresses_, [id](const Address& a) { return a.id == id; });
  if (found == addresses_.end()) return std::nullopt;
  return static_cast<int>(found - addresses_.begin());
}

bool Picker::Suspects(AddressId id, absl::Time silent_since) const {
  const absl::Time now = clock_.Now();
  const std::optional<int> index = index_of(id);
  if (!HasOther(index.value_or(-1), now)) return false;
  if (!index.has_value() || addresses_[*index].gone) return now - silent_since >= kSilence;
  const int address = *index;
  int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    if (slot.address == address) bytes += slot.outstanding_bytes;
  }
  const absl::Duration most =
      std::max(kSilence, absl::Seconds(3 * static_cast<double>(bytes) / rate_));
  return now - std::max(silent_since, addresses_[address].heard_at) >= most;
}

// Without another address calls stay where they are: keepalive ends them if nothing comes.
std::vector<uint64_t> Picker::Probed(AddressId id, bool answers) {
  const std::optional<int> index = index_of(id);
  if (!index.has_value()) return {};
  const int address_index = *index;
  const absl::Time now = clock_.Now();
  Address& address = addresses_[address_index];
  if (answers) address.heard_at = now;
  const bool news = std::exchange(address.silent, !answers) == answers;
  if (answers && news) address.moved = {};  // calls were slow because it stood still
  if (answers || !HasOther(address_index, now)) return {};
  address.reported_at = now;  // its calls' failures are this one
  std::vector<uint64_t> stuck;
  for (const Slot& slot : slots_) {
    const bool is_there = slot.address == address_index;
    if (is_there && (news || slot.outstanding_bytes > 0)) stuck.push_back(slot.id);
  }
  return stuck;
}

bool Picker::all_gone() const {
  return absl::c_all_of(addresses_, [](const Address& a) { return a.gone; });
}

std::vector<int> Picker::usable_addresses() const {
  const absl::Time now = clock_.Now();
  std::vector<int> usable, possible;
  for (int a = 0; a < address_count(); ++a) {
    if (IsUsable(addresses_[a], now)) usable.push_back(a);
    if (!addresses_[a].gone) possible.push_back(a);
  }
  return usable.empty() ? possible : usable;
}

}  // namespace attnd
