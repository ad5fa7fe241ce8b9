// A simulation of a fleet, by a seed: clients, each with its own picker and budget of retries, send
// calls to daemons that compute one call after the other, over a network with a round trip. Pickers
// and rules of retries are the real ones; what CallRunner and Prober do with them is written here
// once more, without gRPC. Daemons join, drain, freeze, thaw and vanish while calls run.
//
// Compared is the time for which calls wait for a daemon to begin with them, with the same calls in
// ideal fleets, which know all daemons exactly and at once. ATTND_TEST_DAEMONS says how many
// daemons there are, of ten clients each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "client/channels/picker.h"
#include "client/channels/prober.h"
#include "client/channels/retry.h"

namespace attnd {
namespace {

constexpr double kWatchEvery = 0.05;       // CallRunner's poll
constexpr double kLookUpEvery = 2;         // ReplicaName's, of a file
constexpr double kBytesPerSecond = 100e6;  // that a call of a second's work brings

class SimulatedClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::UnixEpoch() + absl::Seconds(seconds); }
  double seconds = 0;
};

// Things that are to happen, by their time; of equal times in the order in which it was asked for.
class Events {
 public:
  explicit Events(SimulatedClock& clock) : clock_(clock) {}
  void In(double seconds, std::function<void()> what) {
    At(clock_.seconds + seconds, std::move(what));
  }
  void At(double seconds, std::function<void()> what) {
    events_.push({seconds, ++count_, std::move(what)});
  }
  void RunUntil(double end) {
    while (!events_.empty() && events_.top().at <= end) {
      const Event event = events_.top();
      events_.pop();
      clock_.seconds = event.at;
      event.what();
    }
    clock_.seconds = end;
  }

 private:
  struct Event {
    double at;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return std::tie(at, number) > std::tie(other.at, other.number);
    }
  };
  SimulatedClock& clock_;
  std::priority_queue<Event> events_;
  uint64_t count_ = 0;
};

struct Traffic {
  int clients = 0;
  double load = 0.75;     // of what all daemons can do
  double seconds = 0.01;  // that a call takes a daemon of speed 1, on average
  int burst = 1;          // calls that a client begins at once
  double begin = 0, end = 0;
};

struct Arrival {
  double at = 0;
  int client = 0;
  double work = 0;  // seconds on a daemon of speed 1
};
using Burst = std::vector<Arrival>;  // calls that one client begins at once

// Bursts are Poisson, work is exponential.
std::vector<Burst> BurstsOf(const Traffic& traffic, double capacity, Random& random) {
  auto exponential = [&](double mean) { return -mean * std::log(1 - random.Uniform()); };
  const double gap = traffic.seconds * traffic.burst / (traffic.load * capacity);
  std::vector<Burst> bursts;
  for (double at = traffic.begin; (at += exponential(gap)) < traffic.end;) {
    const int client = static_cast<int>(random.Between(0, traffic.clients - 1));
    bursts.emplace_back();
    for (int n = 0; n < traffic.burst; ++n) {
      bursts.back().push_back({at, client, exponential(traffic.seconds)});
    }
  }
  return bursts;
}

// How long calls waited, of those since traffic has settled.
struct Outcome {
  std::vector<double> waits;

  double Wait(double part) {
    CHECK(!waits.empty());
    const auto nth = waits.begin() + static_cast<ptrdiff_t>(part * (waits.size() - 1));
    std::nth_element(waits.begin(), nth, waits.end());
    return *nth;
  }
};

// Each call goes at once to the daemon that would end it first, of `choices` that are picked at
// random in proportion to their speed; 0: of all.
Outcome Ideal(const std::vector<Burst>& bursts, const std::vector<double>& speeds, int choices,
              double settled, Random random) {
  std::vector<double> until(speeds.size(), 0), sums;
  for (double speed : speeds) sums.push_back((sums.empty() ? 0 : sums.back()) + speed);
  Outcome outcome;
  auto any = [&] {
    return absl::c_upper_bound(sums, random.Uniform() * sums.back()) - sums.begin();
  };
  auto send = [&](const Arrival& call) {
    size_t best = 0;
    double best_end = std::numeric_limits<double>::infinity();
    for (size_t n = 0; n < (choices > 0 ? choices : speeds.size()); ++n) {
      const size_t daemon = choices > 0 ? any() : n;
      const double end = std::max(until[daemon], call.at) + call.work / speeds[daemon];
      if (end < best_end) {
        best = daemon;
        best_end = end;
      }
    }
    if (call.at >= settled) outcome.waits.push_back(std::max(0.0, until[best] - call.at));
    until[best] = best_end;
  };
  for (const Burst& burst : bursts) absl::c_for_each(burst, send);
  return outcome;
}

// One call of a client, and where it is.
struct Call {
  int client = 0;
  double begun = 0, work = 0;
  int64_t bytes = 0;
  std::vector<bool> tried;
  int failed = 0;  // tries
};

struct Attempt {
  std::shared_ptr<Call> call;  // shared_ptr: its tries may outlive each other
  uint64_t slot = 0;
  int address = 0;
  AddressId id{};
  std::string target;
  double begun = 0;
  bool ended = false;
};
using AttemptPtr = std::shared_ptr<Attempt>;  // shared_ptr: client, daemon and events have it

enum class State { kServing, kDraining, kFrozen, kGone };

struct Daemon {
  State state = State::kServing;
  double speed = 1;
  std::deque<AttemptPtr> queue;  // the first one is being computed, or would be
  uint64_t run = 0;              // counts beginnings, so that an end that was put off is known
  double busy = 0;               // seconds
};

struct Client {
  Client(const Clock& clock, uint64_t seed) : picker(clock, 8, seed), budget(RetryPolicy()) {}
  Picker picker;
  RetryBudget budget;
  std::set<AddressId> probed;
  std::vector<AttemptPtr> in_flight;
  size_t list = 0;               // that it has read
  std::function<double()> next;  // SendInTurn's
};

class Fleet {
 public:
  Fleet(const std::vector<double>& speeds, int clients, uint64_t seed)
      : random_(seed), events_(clock_) {
    for (double speed : speeds) Add(speed);
    for (int n = 0; n < clients; ++n) {
      Client& client = clients_.emplace_back(clock_, random_.Bits());
      for (const std::string& target : listed_) client.picker.Add(target, 0);
      client.picker.Begin();
      client.list = lists_;
      LookUpEachTime(n, random_.Uniform() * kLookUpEvery);
    }
  }

  // ---- What happens to daemons. A name's list has those that were added and not removed.

  std::string Add(double speed) {
    const std::string target = absl::StrCat("ipv4:10.0.0.1:", ++named_);
    daemons_[target].speed = speed;
    listed_.push_back(target);
    ++lists_;
    return target;
  }
  void Remove(const std::string& target) {
    std::erase(listed_, target);
    ++lists_;
  }
  void Drain(const std::string& target) { daemons_[target].state = State::kDraining; }
  void Freeze(const std::string& target) {
    Daemon& daemon = daemons_[target];
    daemon.state = State::kFrozen;
    ++daemon.run;
  }
  void Thaw(const std::string& target) {
    Daemon& daemon = daemons_[target];
    daemon.state = State::kServing;
    std::erase_if(daemon.queue, [](const AttemptPtr& attempt) { return attempt->ended; });
    if (!daemon.queue.empty()) Begin(target);
  }
  // Its process ends: connections are closed, further ones refused.
  void Kill(const std::string& target) {
    Daemon& daemon = daemons_[target];
    daemon.state = State::kGone;
    ++daemon.run;
    for (const AttemptPtr& attempt : std::exchange(daemon.queue, {})) Refuse(attempt);
  }

  // ---- Traffic.

  // Calls that begin before `settled` are not counted.
  void Send(const std::vector<Burst>& bursts, double settled) {
    settled_ = settled;
    for (const Burst& burst : bursts) {
      events_.At(burst.front().at, [this, burst] { AskQueues(burst); });
    }
  }
  // From now on the client begins its next call, of as much work as `next` says, as its last ends.
  void SendInTurn(int client, std::function<double()> next) {
    clients_[client].next = std::move(next);
    SendNext(client);
  }
  void RunUntil(double seconds) { events_.RunUntil(seconds); }
  void At(double seconds, std::function<void()> what) { events_.At(seconds, std::move(what)); }

  const std::vector<std::string>& listed() const { return listed_; }
  Daemon& daemon(const std::string& target) { return daemons_[target]; }
  int failed_calls() const { return failed_calls_; }
  int64_t asked() const { return asked_; }
  int64_t calls_at(const std::string& target) const {
    const auto it = calls_at_.find(target);
    return it == calls_at_.end() ? 0 : it->second;
  }
  const std::vector<double>& waits() const { return waits_; }
  // That were ended because their daemon did not answer: for how long it had them.
  const std::vector<double>& held() const { return held_; }
  int most_tries() const { return most_tries_; }  // of a call
  int in_flight() const {
    size_t calls = 0;
    for (const Client& client : clients_) calls += client.in_flight.size();
    return static_cast<int>(calls);
  }

  int MostSocketsOfClient() const {
    size_t most = 0;
    for (const Client& client : clients_) most = std::max(most, client.picker.slots().size());
    return static_cast<int>(most);
  }
  int MostSocketsOfDaemon() const {
    std::map<std::string, int> sockets;
    for (const Client& client : clients_) {
      for (const Picker::Slot& slot : client.picker.slots()) {
        ++sockets[client.picker.target(slot.address)];
      }
    }
    int most = 0;
    for (const auto& [target, count] : sockets) most = std::max(most, count);
    return most;
  }

 private:
  static constexpr double kHalfTrip = 0.0001;

  // ---- A client: AttentionClient and CallRunner.

  void SendNext(int number) {
    if (clients_[number].next == nullptr) return;
    AskQueues({{clock_.seconds, number, clients_[number].next()}});
  }

  void AskQueues(const Burst& burst) {
    const int number = burst.front().client;
    Client& client = clients_[number];
    const std::vector<int> asked = client.picker.ToAsk(static_cast<int>(burst.size()));
    asked_ += static_cast<int64_t>(asked.size());
    double took = 0;
    for (int address : asked) took = std::max(took, AskQueue(number, address));
    events_.In(took, [this, burst, took] {
      if (took > 0) clients_[burst.front().client].picker.Asked(absl::Seconds(took));
      for (const Arrival& one : burst) {
        auto call = std::make_shared<Call>();
        call->client = one.client;
        call->begun = one.at;
        call->work = one.work;
        call->bytes = static_cast<int64_t>(one.work * kBytesPerSecond);
        Try(call);
      }
    });
  }

  // For so long the answer is waited for.
  double AskQueue(int number, int address) {
    const double patience = absl::ToDoubleSeconds(clients_[number].picker.asking_patience());
    const std::string& target = clients_[number].picker.target(address);
    if (daemons_[target].state == State::kFrozen) {
      events_.In(patience, [this, number, target, id = clients_[number].picker.id(address)] {
        Suspect(number, id, target, absl::InfinitePast());
      });
      return patience;
    }
    const double begun = clock_.seconds;
    events_.In(kHalfTrip, [this, number, address, target, begun] {
      const bool answers = daemons_[target].state != State::kGone;
      events_.In(kHalfTrip, [this, number, address, answers, begun, queue = QueueOf(target)] {
        Picker& picker = clients_[number].picker;
        if (answers) {
          picker.ReportQueue(address, absl::Seconds(queue));
        } else {
          picker.ReportUnavailable(address, absl::UnixEpoch() + absl::Seconds(begun));
        }
      });
    });
    return 2.01 * kHalfTrip;
  }

  void Try(const std::shared_ptr<Call>& call) {
    Client& client = clients_[call->client];
    const Picker::Slot& slot = client.picker.Pick(call->bytes, call->tried);
    auto attempt = std::make_shared<Attempt>();
    attempt->call = call;
    attempt->slot = slot.id;
    attempt->address = slot.address;
    attempt->id = client.picker.id(slot.address);
    attempt->target = client.picker.target(slot.address);
    attempt->begun = clock_.seconds;
    client.in_flight.push_back(attempt);
    ++calls_at_[attempt->target];
    most_tries_ = std::max(most_tries_, call->failed + 1);
    events_.In(kHalfTrip, [this, attempt] { Arrive(attempt); });
    events_.In(absl::ToDoubleSeconds(Picker::kSilence), [this, attempt] { Watch(attempt); });
  }

  void Watch(const AttemptPtr& attempt) {
    if (attempt->ended) return;
    const absl::Time begun = absl::UnixEpoch() + absl::Seconds(attempt->begun);
    const int client = attempt->call->client;
    Suspect(client, attempt->id, attempt->target, begun);
    events_.In(kWatchEvery, [this, attempt] { Watch(attempt); });
  }

  bool End(const AttemptPtr& attempt) {
    if (std::exchange(attempt->ended, true)) return false;
    Client& client = clients_[attempt->call->client];
    std::erase(client.in_flight, attempt);
    client.picker.Release(attempt->slot, attempt->call->bytes);
    return true;
  }

  void Succeed(const AttemptPtr& attempt, double queue) {
    if (!End(attempt)) return;
    Client& client = clients_[attempt->call->client];
    client.picker.ReportAlive(attempt->address);
    client.picker.ReportMoved(attempt->address, attempt->call->bytes,
                              absl::Seconds(clock_.seconds - attempt->begun));
    client.picker.ReportQueue(attempt->address, absl::Seconds(queue));
    client.budget.OnSuccess();
    SendNext(attempt->call->client);
  }

  void Fail(const AttemptPtr& attempt) {
    if (!End(attempt)) return;
    const std::shared_ptr<Call>& call = attempt->call;
    Client& client = clients_[call->client];
    call->tried.resize(client.picker.address_count());
    call->tried[attempt->address] = true;
    const bool news = client.picker.ReportUnavailable(
        attempt->address, absl::UnixEpoch() + absl::Seconds(attempt->begun));
    if (news) LookUp(call->client);
    const FailedAttempt failed = {.status = absl::UnavailableError("simulated"),
                                  .attempts = ++call->failed,
                                  .other_address = absl::c_linear_search(call->tried, false)};
    const auto delay = RetryDelay(RetryPolicy(), failed, random_.Uniform());
    const bool free = !news && failed.other_address;
    if (!delay.has_value() || !(free || client.budget.TakeFor(failed))) {
      ++failed_calls_;
      return;
    }
    events_.In(absl::ToDoubleSeconds(*delay), [this, call] { Try(call); });
  }

  void LookUp(int number) {
    Client& client = clients_[number];
    if (std::exchange(client.list, lists_) != lists_) client.picker.Follow(0, listed_);
  }
  void LookUpEachTime(int number, double in) {
    events_.In(in, [this, number] {
      LookUp(number);
      LookUpEachTime(number, kLookUpEvery);
    });
  }

  // ---- A client: Prober.

  void Suspect(int number, AddressId id, const std::string& target, absl::Time silent_since) {
    Client& client = clients_[number];
    if (!client.picker.Suspects(id, silent_since)) return;
    if (client.probed.insert(id).second) Probe(number, id, target);
  }

  void Probe(int number, AddressId id, const std::string& target) {
    const State state = daemons_[target].state;
    const double in =
        state == State::kFrozen ? absl::ToDoubleSeconds(Prober::kPatience) : kHalfTrip;
    const bool answers = state == State::kServing || state == State::kDraining;
    events_.In(in, [this, number, id, target, answers] { Answered(number, id, target, answers); });
  }

  void Answered(int number, AddressId id, const std::string& target, bool answers) {
    Client& client = clients_[number];
    const std::optional<int> index = client.picker.index_of(id);
    if (answers || !index.has_value() || client.picker.is_gone(*index)) {
      client.probed.erase(id);
    } else {
      events_.In(absl::ToDoubleSeconds(Prober::kAgain),
                 [this, number, id, target] { Probe(number, id, target); });
    }
    for (uint64_t slot : client.picker.Probed(id, answers)) client.picker.Renew(slot);
    std::vector<AttemptPtr> stuck;
    for (const AttemptPtr& attempt : client.in_flight) {
      if (!answers && attempt->id == id) stuck.push_back(attempt);
    }
    for (const AttemptPtr& attempt : stuck) {
      held_.push_back(clock_.seconds - attempt->begun);
      Fail(attempt);
    }
  }

  // ---- A daemon.

  void Arrive(const AttemptPtr& attempt) {
    Daemon& daemon = daemons_[attempt->target];
    if (daemon.state == State::kDraining || daemon.state == State::kGone) return Refuse(attempt);
    daemon.queue.push_back(attempt);
    if (daemon.queue.size() > 1) return;
    if (daemon.state == State::kServing) Begin(attempt->target);
  }

  void Refuse(const AttemptPtr& attempt) {
    events_.In(kHalfTrip, [this, attempt] { Fail(attempt); });
  }

  // As Admission counts it: all that is not computed yet, whole.
  double QueueOf(const std::string& target) {
    const Daemon& daemon = daemons_[target];
    double seconds = 0;
    for (const AttemptPtr& one : daemon.queue) seconds += one->call->work / daemon.speed;
    return seconds;
  }

  void Begin(const std::string& target) {
    Daemon& daemon = daemons_[target];
    const Call& call = *daemon.queue.front()->call;
    if (call.begun >= settled_) waits_.push_back(clock_.seconds - kHalfTrip - call.begun);
    Compute(target, call.work / daemon.speed);
  }

  void Compute(const std::string& target, double seconds) {
    Daemon& daemon = daemons_[target];
    events_.In(seconds, [this, target, run = ++daemon.run] {
      if (daemons_[target].run == run) EndFirst(target);
    });
  }

  void EndFirst(const std::string& target) {
    Daemon& daemon = daemons_[target];
    const AttemptPtr attempt = daemon.queue.front();
    daemon.queue.pop_front();
    if (attempt->call->begun >= settled_) daemon.busy += attempt->call->work / daemon.speed;
    const double queue = QueueOf(target);
    events_.In(kHalfTrip, [this, attempt, queue] { Succeed(attempt, queue); });
    if (!daemon.queue.empty()) Begin(target);
  }

  Random random_;
  SimulatedClock clock_;
  Events events_;
  std::map<std::string, Daemon> daemons_;
  std::vector<std::string> listed_;
  size_t lists_ = 0;  // that the name has had
  int named_ = 0;
  std::deque<Client> clients_;
  double settled_ = 0;
  std::vector<double> waits_, held_;
  std::map<std::string, int64_t> calls_at_;
  int failed_calls_ = 0, most_tries_ = 0;
  int64_t asked_ = 0;
};

int Daemons() {
  const char* count = std::getenv("ATTND_TEST_DAEMONS");
  return count == nullptr ? 64 : std::atoi(count);
}

// In times of a call's mean work.
std::string Waits(Outcome& outcome, double seconds) {
  return absl::StrFormat("p50 %.2f p99 %.2f", outcome.Wait(0.5) / seconds,
                         outcome.Wait(0.99) / seconds);
}

// Daemons join, drain and freeze while calls run.
void ExpectNearlyIdeal(double load, int burst) {
  const int daemons = Daemons(), clients = 10 * daemons, few = std::max(1, daemons / 100);
  constexpr double kSettled = 4;
  Fleet fleet(std::vector<double>(daemons, 1), clients, 1);
  const Traffic traffic = {.clients = clients, .load = load, .burst = burst, .end = 9};
  Random random(2);
  const std::vector<Burst> bursts = BurstsOf(traffic, daemons, random);
  fleet.Send(bursts, kSettled);
  for (int n = 0; n < few; ++n) {
    fleet.At(5, [&] { fleet.Add(1); });
    const std::string drains = fleet.listed()[n];
    fleet.At(5.5, [&, drains] { fleet.Drain(drains); });
    fleet.At(5.8, [&, drains] { fleet.Remove(drains); });
    fleet.At(6.5, [&, drains] { fleet.Kill(drains); });
    fleet.At(6, [&, target = fleet.listed()[few + n]] { fleet.Freeze(target); });
  }
  fleet.RunUntil(traffic.end + 10);
  const std::vector<double> serving(daemons - few, 1);
  Outcome real = {fleet.waits()}, ideal = Ideal(bursts, serving, 2, kSettled, random),
          blind = Ideal(bursts, serving, 1, kSettled, random);
  std::cout << absl::StrFormat("%d daemons, load %.1f, %d calls at once: waits %s; ideal %s; ",
                               daemons, load, burst, Waits(real, traffic.seconds),
                               Waits(ideal, traffic.seconds))
            << absl::StrFormat("blind %s; %.1f asked a call; %d sockets a client, %d a daemon\n",
                               Waits(blind, traffic.seconds),
                               static_cast<double>(fleet.asked()) / (burst * bursts.size()),
                               fleet.MostSocketsOfClient(), fleet.MostSocketsOfDaemon());
  EXPECT_LE(real.Wait(0.99), 1.3 * ideal.Wait(0.99));
  EXPECT_EQ(fleet.failed_calls(), 0);
  EXPECT_LE(fleet.MostSocketsOfClient(), 32);
  EXPECT_LE(fleet.MostSocketsOfDaemon(), 640);
}

TEST(Fleet, WaitsLittleLongerThanWhereTwoDaemonsAreKnownExactly) {
  for (int burst : {1, 8}) {
    for (double load : {0.7, 0.8}) ExpectNearlyIdeal(load, burst);
  }
}

// Every second one is four times as fast as the others.
TEST(Fleet, KeepsSlowAndFastDaemonsBusyAlike) {
  const int daemons = Daemons() / 4;
  constexpr double kSettled = 6, kEnd = 36;
  std::vector<double> speeds;
  for (int n = 0; n < daemons; ++n) speeds.push_back(n % 2 == 0 ? 1 : 4);
  Fleet fleet(speeds, 10 * daemons, 3);
  const Traffic traffic = {.clients = 10 * daemons, .load = 0.75, .end = kEnd};
  Random random(4);
  const std::vector<Burst> bursts = BurstsOf(traffic, 2.5 * daemons, random);
  fleet.Send(bursts, kSettled);
  fleet.RunUntil(kEnd + 10);
  Outcome real = {fleet.waits()}, ideal = Ideal(bursts, speeds, 2, kSettled, random);
  std::vector<double> busy;
  for (const std::string& target : fleet.listed()) busy.push_back(fleet.daemon(target).busy);
  const double mean = absl::c_accumulate(busy, 0.0) / daemons;
  const double most = *absl::c_max_element(busy) / mean;
  std::cout << absl::StrFormat("%d daemons, slow and fast: waits %s; ideal %s; ", daemons,
                               Waits(real, traffic.seconds), Waits(ideal, traffic.seconds))
            << absl::StrFormat("the busiest is busy for %.2f of the mean\n", most);
  EXPECT_LE(real.Wait(0.99), 1.5 * ideal.Wait(0.99));
  EXPECT_LE(most, 1.1);
}

// Seconds of work that callers, each with one call at a time, get done in ten seconds.
double DoneBy(int callers, int daemons, const std::function<double()>& work) {
  Fleet fleet(std::vector<double>(daemons, 1), callers, 9);
  for (int n = 0; n < callers; ++n) fleet.SendInTurn(n, work);
  fleet.RunUntil(10);
  EXPECT_EQ(fleet.failed_calls(), 0);
  double busy = 0;
  for (const std::string& target : fleet.listed()) busy += fleet.daemon(target).busy;
  return busy;
}

TEST(Fleet, DoesAlmostFourTimesAsMuchByFourDaemonsForSixteenCallers) {
  Random random(10);
  const auto equal = [] { return 0.01; };
  const auto varied = [&] { return -0.01 * std::log(1 - random.Uniform()); };
  const double of_equal = DoneBy(16, 4, equal) / DoneBy(16, 1, equal);
  const double of_varied = DoneBy(16, 4, varied) / DoneBy(16, 1, varied);
  std::cout << absl::StrFormat("16 callers, 4 daemons: %.2f times as much as one, %.2f of calls ",
                               of_equal, of_varied)
            << "that differ\n";
  EXPECT_GE(of_equal, 3.8);
  EXPECT_GE(of_varied, 3.8);
}

// One of them stands still for a while.
void ExpectFewHeld(int replicas, double load) {
  Fleet fleet(std::vector<double>(replicas, 1), 5 * replicas, 5);
  const Traffic traffic = {.clients = 5 * replicas, .load = load, .end = 30};
  Random random(6);
  fleet.Send(BurstsOf(traffic, replicas, random), 0);
  const std::string frozen = fleet.listed()[0];
  int64_t noticed = 0, thawed = 0;
  fleet.At(5, [&] { fleet.Freeze(frozen); });
  fleet.At(12, [&] { noticed = fleet.calls_at(frozen); });
  fleet.At(20, [&] {
    thawed = fleet.calls_at(frozen);
    fleet.Thaw(frozen);
  });
  fleet.RunUntil(60);
  const double longest = fleet.held().empty() ? 0 : *absl::c_max_element(fleet.held());
  const int64_t after = fleet.calls_at(frozen) - thawed;
  std::cout << absl::StrFormat("1 of %d frozen: %d calls held, for %.2f s at most; ", replicas,
                               fleet.held().size(), longest)
            << absl::StrFormat("%d calls there once it had thawed\n", after);
  EXPECT_EQ(fleet.failed_calls(), 0);
  EXPECT_EQ(fleet.most_tries(), 2);
  EXPECT_LE(longest, 3);
  EXPECT_EQ(thawed, noticed) << "calls went there while it stood still";
  EXPECT_GT(after, 10 * load * 100 / 2) << "it got less than half of its part";
  EXPECT_EQ(fleet.in_flight(), 0);
}

TEST(Fleet, HoldsCallsOfAFrozenDaemonOnceAndUsesItAgain) {
  ExpectFewHeld(2, 0.35);
  ExpectFewHeld(8, 0.6);
}

// Each second one joins, one drains and leaves, and one vanishes with its address.
TEST(Fleet, WaitsForNoAddressThatHasGone) {
  constexpr int kDaemons = 24;
  Fleet fleet(std::vector<double>(kDaemons, 1), 5 * kDaemons, 7);
  const Traffic traffic = {.clients = 5 * kDaemons, .load = 0.4, .end = 12};
  Random random(8);
  fleet.Send(BurstsOf(traffic, kDaemons, random), 0);
  for (int second = 1; second <= 10; ++second) {
    const std::string drains = fleet.listed()[second], vanishes = fleet.listed()[10 + second];
    fleet.At(second, [&] {
      fleet.Add(1);
      fleet.Add(1);
    });
    fleet.At(second + 0.1, [&, drains] { fleet.Drain(drains); });
    fleet.At(second + 0.3, [&, drains] { fleet.Remove(drains); });
    fleet.At(second + 0.5, [&, drains] { fleet.Kill(drains); });
    fleet.At(second + 0.7, [&, vanishes] {
      fleet.Freeze(vanishes);
      fleet.Remove(vanishes);
    });
  }
  fleet.RunUntil(20);
  const double longest = fleet.held().empty() ? 0 : *absl::c_max_element(fleet.held());
  std::cout << absl::StrFormat("addresses change: %d calls held, for %.2f s at most\n",
                               fleet.held().size(), longest);
  EXPECT_EQ(fleet.failed_calls(), 0);
  EXPECT_EQ(fleet.in_flight(), 0) << "calls wait for ever";
  EXPECT_LE(longest, 3);
  EXPECT_LE(fleet.MostSocketsOfClient(), 32);
}

}  // namespace
}  // namespace attnd
