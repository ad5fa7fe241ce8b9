#include "client/cli/table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/printable.h"

namespace attnd {
namespace {

// Columns on a terminal: UTF-8 bytes that continue a character take none.
size_t Width(absl::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
}

bool LooksLikeANumber(absl::string_view text) {
  return !text.empty() && (absl::ascii_isdigit(text[0]) || text == "-" ||
                           (text[0] == '-' && text.size() > 1 && absl::ascii_isdigit(text[1])));
}

std::string Padded(absl::string_view text, absl::string_view shown, size_t width) {
  std::string space(width - Width(text), ' ');
  return LooksLikeANumber(text) ? absl::StrCat(space, shown) : absl::StrCat(shown, space);
}

std::string Scaled(double value, double base, const std::vector<const char*>& units) {
  size_t unit = 0;
  while (std::fabs(value) >= base && unit + 1 < units.size()) {
    value /= base;
    ++unit;
  }
  int digits = std::fabs(value) < 10 ? 2 : std::fabs(value) < 100 ? 1 : 0;
  if (unit == 0 && value == std::floor(value)) digits = 0;
  return absl::StrFormat("%.*f %s", digits, value, units[unit]);
}

}  // namespace

std::string Colored(absl::string_view text, Color color, bool enabled) {
  if (!enabled || color == Color::kNone) return std::string(text);
  const char* code = color == Color::kGreen    ? "32"
                     : color == Color::kYellow ? "33"
                     : color == Color::kRed    ? "31"
                                               : "1";
  return absl::StrCat("\033[", code, "m", text, "\033[0m");
}

void Table::Add(std::vector<Cell> row) {
  for (Cell& cell : row) cell.text = Printable(cell.text);
  rows_.push_back(std::move(row));
}

void Table::Print(std::ostream& out, bool color) const {
  std::vector<size_t> widths;
  for (const std::string& title : header_) widths.push_back(Width(title));
  for (const auto& row : rows_) {
    for (size_t n = 0; n < row.size(); ++n) widths[n] = std::max(widths[n], Width(row[n].text));
  }
  auto print = [&](size_t columns, auto&& cell) {
    std::string line;
    for (size_t n = 0; n < columns; ++n) absl::StrAppend(&line, n == 0 ? "" : "  ", cell(n));
    out << std::string(absl::StripTrailingAsciiWhitespace(line)) << "\n";
  };
  print(header_.size(), [&](size_t n) {
    // A title stands over its numbers.
    bool number = !rows_.empty() && n < rows_[0].size() && LooksLikeANumber(rows_[0][n].text);
    std::string space(widths[n] - Width(header_[n]), ' ');
    std::string title = Colored(header_[n], Color::kBold, color);
    return number ? space + title : title + space;
  });
  for (const auto& row : rows_) {
    print(row.size(), [&](size_t n) {
      return Padded(row[n].text, Colored(row[n].text, row[n].color, color), widths[n]);
    });
  }
}

std::string Shortened(absl::string_view text, int columns) {
  std::string shown = Printable(text);
  const size_t limit = static_cast<size_t>(std::max(1, columns));
  if (Width(shown) <= limit) return shown;
  size_t end = 0, width = 0;
  while (width < limit - 1 || (static_cast<unsigned char>(shown[end]) & 0xc0) == 0x80) {
    width += (static_cast<unsigned char>(shown[end++]) & 0xc0) != 0x80;
  }
  return shown.substr(0, end) + "…";
}

std::string BytesText(double bytes) {
  return Scaled(bytes, 1024, {"B", "KiB", "MiB", "GiB", "TiB"});
}

std::string SecondsText(double seconds) {
  if (seconds < 1e-3) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 1e-1) return absl::StrFormat("%.2f ms", seconds * 1e3);
  if (seconds < 1) return absl::StrFormat("%.0f ms", seconds * 1e3);
  return absl::StrFormat("%.2f s", seconds);
}

std::string FlopsText(double flops) {
  return Scaled(flops, 1000, {"FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"});
}

std::string NumberText(double value) { return absl::StrFormat("%.3g", value); }

std::string CountText(double value) {
  if (value < 999.5) return NumberText(value);
  std::string text = Scaled(value, 1000, {"", "k", "M", "G", "T"});
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  return text;
}

}  // namespace attnd
