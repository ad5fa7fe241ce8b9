// ResidualState: what a Residual stands for: how its Forward was cut, and each shard's lease. Its
// end gives the leases up. The list is fixed; what becomes of each lease is the book's to know, so
// several Backwards may use one at the same time.
#pragma once

#include <memory>
#include <vector>

#include "attention/problem.h"
#include "attention/shard.h"
#include "client/call/lease_book.h"

namespace attnd {

struct ResidualState {
  ResidualState(const Problem& forward, std::vector<ShardRange> ranges,
                std::vector<LeaseBook::Id> ids, std::shared_ptr<LeaseBook> keeper)
      : problem(forward),
        shards(std::move(ranges)),
        leases(std::move(ids)),
        book(std::move(keeper)) {}
  ~ResidualState();
  ResidualState(const ResidualState&) = delete;
  ResidualState& operator=(const ResidualState&) = delete;

  const Problem problem;
  const std::vector<ShardRange> shards;
  const std::vector<LeaseBook::Id> leases;  // of each shard; 0: none
  const std::shared_ptr<LeaseBook> book;    // the client's
};

}  // namespace attnd
