// Table: rows of text in aligned columns for a terminal. Cells that look like numbers are set
// right. A cell may carry a colour, which counts no width; its text is shown as printable.h has it.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace attnd {

enum class Color { kNone, kGreen, kYellow, kRed, kBold };

struct Cell {
  Cell(std::string text, Color color = Color::kNone) : text(std::move(text)), color(color) {}
  Cell(const char* text) : text(text) {}
  std::string text;
  Color color = Color::kNone;
};

class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void Add(std::vector<Cell> row);
  void Print(std::ostream& out, bool color) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<Cell>> rows_;
};

// The text in a colour, or as it is.
std::string Colored(absl::string_view text, Color color, bool enabled);

// Printable, and at most so many columns wide; "…" stands for what was cut off.
std::string Shortened(absl::string_view text, int columns);

// "1.50 GiB", "12.3 ms", "4.56 TFLOP/s": three significant digits with a unit.
std::string BytesText(double bytes);
std::string SecondsText(double seconds);
std::string FlopsText(double flops_per_second);
std::string NumberText(double value);
// "950", "12.3k", "4.56M": at most six columns below 10¹⁵.
std::string CountText(double value);

}  // namespace attnd
