// MaskPicture: what one head of a mask shows, as cells with the share of scores that are visible:
// for a terminal or a PNG file. A value; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/problem.h"

namespace attnd {

class MaskPicture {
 public:
  // Draws batch entry 0 and head 0 of a problem with a mask, in at most so many cells; fewer where
  // the mask is smaller. OUT_OF_RANGE when it takes too long to compile.
  static absl::StatusOr<MaskPicture> Draw(const Problem& problem, int64_t most_rows,
                                          int64_t most_columns);

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  double Share(int64_t row, int64_t column) const { return shares_[row * columns_ + column]; }

  // A line for each row: "#" all of a cell is visible, "+" some, "." nothing.
  std::string Text() const;
  // Black is visible, a pixel for each cell. NOT_FOUND when the file cannot be written.
  absl::Status WritePng(const std::string& path) const;

 private:
  MaskPicture(int64_t rows, int64_t columns)
      : rows_(rows), columns_(columns), shares_(static_cast<size_t>(rows * columns)) {}

  int64_t rows_, columns_;
  std::vector<double> shares_;  // [rows, columns]
};

}  // namespace attnd
