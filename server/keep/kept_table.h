// KeptTable: values that the server keeps for callers, each under its key, with its bytes, its
// owner and the time for which it stays unused.
//
//   Insert → kept ── Touch: used now ───┬── Erase                         its owner asks, or
//                    Prolong: stays on  ├── Expired                       `idle` has passed
//                                       └── MakeRoom, the longest unused  another one has no room
//
// A place is a memory with a limit of its own (host memory, a GPU's). An owner's limit holds over
// all places. MakeRoom before Insert keeps both. The table erases nothing by itself: Expired and
// MakeRoom name entries to the class that has the table, which ends them as it must and calls
// Erase. An entry stays where it is until then. Not thread-safe: that class's mutex guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/node_hash_map.h"
#include "absl/time/time.h"

namespace attnd {

template <class Key, class Value>
class KeptTable {
 public:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  struct Entry;
  using ByUse = std::list<Entry*>;  // the longest unused first
  struct Entry {
    Key key;
    std::string owner;
    size_t place = 0;
    int64_t bytes = 0;
    absl::Duration idle = absl::InfiniteDuration();
    Value value;
    absl::Time used = {}, expires = {};   // from here on set by the table
    typename ByUse::iterator at, own_at;  // in its place's list and in its owner's
    typename std::multimap<absl::Time, Entry*>::iterator expiry_at;
  };

  // `place_bytes`: the limit of each place.
  KeptTable(const std::vector<int64_t>& place_bytes, int64_t owner_bytes)
      : owner_limit_(owner_bytes) {
    for (int64_t limit : place_bytes) places_.push_back({{}, limit});
  }

  Entry* Find(const Key& key) {
    const auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : &found->second;
  }

  // The key is not there yet. The entry counts as used now.
  Entry& Insert(Entry from, absl::Time now) {
    Entry& entry = entries_[from.key];
    entry = std::move(from);
    entry.used = now;
    entry.expires = now + entry.idle;
    entry.expiry_at = by_expiry_.emplace(entry.expires, &entry);
    entry.at = places_[entry.place].Add(entry);
    entry.own_at = owners_[entry.owner].Add(entry);
    return entry;
  }

  void Touch(Entry& entry, absl::Time now) {
    entry.used = now;
    places_[entry.place].MoveToEnd(entry.at);
    owners_[entry.owner].MoveToEnd(entry.own_at);
    Prolong(entry, now);
  }

  // Stays `idle` from now on, and is no more recently used for that.
  void Prolong(Entry& entry, absl::Time now) {
    auto handle = by_expiry_.extract(entry.expiry_at);
    handle.key() = entry.expires = now + entry.idle;
    entry.expiry_at = by_expiry_.insert(std::move(handle));
  }

  void Erase(Entry& entry) {
    by_expiry_.erase(entry.expiry_at);
    places_[entry.place].Take(entry, entry.at);
    const auto owner = owners_.find(entry.owner);
    owner->second.Take(entry, entry.own_at);
    if (owner->second.by_use.empty()) owners_.erase(owner);
    entries_.erase(Key(entry.key));
  }

  // The entry that expired first; null: none has.
  Entry* Expired(absl::Time now) {
    return next_expiry() <= now ? by_expiry_.begin()->second : nullptr;
  }

  // Has `evict(by_use)` erase an entry of a list, the owner's, then the place's, until `bytes` more
  // fit. False where `evict` is false, which erased none, or where they never fit.
  template <class Evict>
  bool MakeRoom(const std::string& owner, size_t place, int64_t bytes, const Evict& evict) {
    Place& at = places_[place];
    if (bytes > std::min(at.limit, owner_limit_)) return false;
    const auto owned = [&] { return owners_.contains(owner) ? owners_[owner].bytes : 0; };
    while (owned() > owner_limit_ - bytes) {
      if (!evict(owners_[owner].by_use)) return false;
    }
    while (at.bytes > at.limit - bytes) {
      if (!evict(at.by_use)) return false;
    }
    return true;
  }

  // InfiniteFuture where nothing is kept.
  absl::Time next_expiry() const {
    return by_expiry_.empty() ? absl::InfiniteFuture() : by_expiry_.begin()->first;
  }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  size_t places() const { return places_.size(); }
  int64_t bytes(size_t place) const { return places_[place].bytes; }
  int64_t limit(size_t place) const { return places_[place].limit; }
  void SetLimit(size_t place, int64_t bytes) { places_[place].limit = bytes; }
  const ByUse& by_use(size_t place) const { return places_[place].by_use; }

 private:
  struct Share {
    typename ByUse::iterator Add(Entry& entry) {
      bytes += entry.bytes;
      return by_use.insert(by_use.end(), &entry);
    }
    void MoveToEnd(typename ByUse::iterator at) { by_use.splice(by_use.end(), by_use, at); }
    void Take(const Entry& entry, typename ByUse::iterator at) {
      bytes -= entry.bytes;
      by_use.erase(at);
    }
    int64_t bytes = 0;
    ByUse by_use = {};
  };
  struct Place : Share {
    int64_t limit = 0;
  };

  const int64_t owner_limit_;
  std::vector<Place> places_;
  absl::node_hash_map<Key, Entry> entries_;
  absl::node_hash_map<std::string, Share> owners_;
  std::multimap<absl::Time, Entry*> by_expiry_;
};

}  // namespace attnd
