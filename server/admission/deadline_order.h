// DeadlineOrder: the admitted calls of one caller at one priority, in the order in which the
// batcher will run them: those that run, then by `due`, then by arrival. Admission asks it what a
// new call would wait for, and whose deadlines it would break. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/time/time.h"

namespace attnd {

class DeadlineOrder {
 public:
  // A call's place. `number` makes it unique and grows with arrival.
  struct Place {
    absl::Time due;
    uint64_t number = 0;
    friend bool operator==(const Place&, const Place&) = default;
    friend bool operator<(const Place& a, const Place& b) {
      return a.due != b.due ? a.due < b.due : a.number < b.number;
    }
  };
  static constexpr absl::Time kRunning = absl::InfinitePast();

  // A sum of many estimates counts in full plus a margin for the reply's way back: under overload a
  // call admitted too late is wasted work.
  static constexpr double kQueueMargin = 1.1;

  // How the device serves this flow beside the others: work of `seconds` of its own ends after at
  // most the others' work, and after at most its share of the weights.
  struct Service {
    double others_seconds = 0;
    double weights = 1;  // of all flows over this one's
    double pace = 1;
    double End(double seconds) const;  // with the margin
  };

  // Predicts what a new call would meet.
  struct Outlook {
    double ahead_seconds = 0;  // estimated work before it, at the device's pace
    bool breaks_another = false;
    // The largest part of the time to its deadline that a waiting call needs; 0 when few wait.
    double pressure = 0;
  };

  void Add(const Place& place, absl::Time deadline, double seconds);
  // The call begins to run, at kRunning.
  void Start(const Place& place);
  void Remove(const Place& place);

  // Predicts for a call of `seconds` that is due then; it would come after all that are due at that
  // time.
  Outlook For(absl::Time due, double seconds, const Service& service, absl::Time now) const;
  bool empty() const { return calls_.empty(); }
  double seconds() const { return seconds_; }

 private:
  struct Call {
    Place place;
    absl::Time deadline;
    double seconds;
  };
  std::vector<Call>::iterator Find(const Place& place);
  void Insert(const Call& call);

  std::vector<Call> calls_;  // by place
  double seconds_ = 0;       // of all
};

}  // namespace attnd
