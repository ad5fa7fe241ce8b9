// BenchReport: the loads that attnctl bench has measured, as a table, JSON or CSV. JSON carries the
// environment, so that a file says where its figures were measured. Of a problem with a mask by
// description there are rows without it too.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "attention/problem.h"
#include "client/cli/load_generator.h"

namespace attnd {

// One direction at one load.
struct BenchRow {
  Direction direction;
  Load load;
  Measured measured;
  bool has_mask;
  double flops;  // of a call
};

class BenchReport {
 public:
  // `mask`: as it was spelled; empty: none.
  BenchReport(const Problem& problem, std::string mask, const ServerInfo& server)
      : p_(problem), mask_(std::move(mask)), server_(server) {}
  // `problem`: that of the report, or the same without its mask.
  void Add(const Load& load, const LoadResult& result, const Problem& problem);
  bool has_errors() const;

  void PrintTable(std::ostream& out, bool color) const;
  nlohmann::ordered_json ToJson() const;
  std::string ToCsv() const;
  // JSON, or CSV when the path ends so.
  absl::Status Write(const std::string& path) const;

 private:
  nlohmann::ordered_json RowJson(const BenchRow& row) const;
  // Payload bytes a second each way, and floating-point operations.
  double SentPerSecond(const BenchRow& row) const;
  double ReceivedPerSecond(const BenchRow& row) const;
  double FlopsPerSecond(const BenchRow& row) const;

  // The scores that the mask shows and an engine visits, as shares of all scores.
  double VisibleShare() const;
  void PrintGains(std::ostream& out) const;

  const Problem p_;
  const std::string mask_;
  const ServerInfo server_;
  std::vector<BenchRow> rows_;
};

}  // namespace attnd
