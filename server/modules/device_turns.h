// DeviceTurns: one call's turns at all devices that its module is on. It has all of them or waits;
// calls that want several take them in one order, so that none waits for another in a circle.
// The call's thread.
#pragma once

#include <deque>
#include <vector>

#include "absl/time/time.h"
#include "modules/module_engine.h"
#include "server/modules/compute_turns.h"

namespace attnd {

class DeviceTurns final : public DeviceYield {
 public:
  // In the devices' order.
  DeviceTurns(const std::vector<ComputeTurns*>& devices, const TurnWish& wish) {
    for (ComputeTurns* turns : devices) places_.emplace_back(*turns, wish);
  }

  // False: the call was stopped, or its deadline has passed.
  bool Take() {
    for (ComputeTurns::Place& place : places_) {
      if (!place.Take()) return false;
    }
    return true;
  }

  bool IsWanted() const override {
    for (const ComputeTurns::Place& place : places_) {
      if (place.IsWanted()) return true;
    }
    return false;
  }
  void Yield() override {
    for (ComputeTurns::Place& place : places_) place.Give();
    for (ComputeTurns::Place& place : places_) place.TakeAgain();
  }

  // Without the time of others' turns between.
  absl::Duration computed() const {
    return places_.empty() ? absl::ZeroDuration()
                           : absl::Seconds(places_.back().computed_seconds());
  }

 private:
  std::deque<ComputeTurns::Place> places_;
};

}  // namespace attnd
