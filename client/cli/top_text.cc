// TopFrame as text.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "client/cli/table.h"
#include "client/cli/top_frame.h"

namespace attnd {
namespace {

constexpr int kWide = 90;  // columns from which bars and names are longer
constexpr size_t kMaxCallers = 10;

// Line: pieces of text side by side, and on the next line, indented, what has no room.
class Line {
 public:
  Line(std::ostream& out, int columns, bool color) : out_(out), columns_(columns), color_(color) {}
  ~Line() { out_ << "\n"; }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  Line& Add(absl::string_view text, Color color = Color::kNone) {
    constexpr int kGap = 3, kIndent = 2;
    const int width = static_cast<int>(text.size());
    if (used_ > 0 && used_ + kGap + width > columns_) {
      out_ << "\n" << std::string(kIndent, ' ');
      used_ = kIndent;
    } else if (used_ > 0) {
      out_ << std::string(kGap, ' ');
      used_ += kGap;
    }
    out_ << Colored(text, color, color_);
    used_ += width;
    return *this;
  }

 private:
  std::ostream& out_;
  const int columns_;
  const bool color_;
  int used_ = 0;
};

std::string QuantileText(double seconds) {
  return std::isnan(seconds) ? "-" : SecondsText(seconds);
}

std::string PercentText(double share) {
  return absl::StrCat(NumberText(std::round(100 * share)), "%");
}

std::string Bar(double share, int width) {
  const int filled = static_cast<int>(std::lround(std::clamp(share, 0.0, 1.0) * width));
  return absl::StrCat("[", std::string(filled, '#'), std::string(width - filled, '.'), "]");
}

int BarWidth(int columns) { return columns < kWide ? 10 : 24; }

void PrintTopSummary(const TopFrame& frame, std::ostream& out, bool color, int columns) {
  const char* state = frame.draining ? "DRAINING" : frame.ready ? "READY" : "NOT READY";
  const Color shade = frame.draining ? Color::kYellow : frame.ready ? Color::kGreen : Color::kRed;
  Line(out, columns, color)
      .Add(state, shade)
      .Add(absl::StrCat("in ", BytesText(frame.received_per_second), "/s"))
      .Add(absl::StrCat("out ", BytesText(frame.sent_per_second), "/s"))
      .Add(absl::StrCat("compute ", FlopsText(frame.flops_per_second)))
      .Add(absl::StrCat("memory ", BytesText(frame.resident_bytes)));
  Line(out, columns, color)
      .Add(absl::StrCat("queue ", CountText(frame.queue_depth), " calls, ",
                        SecondsText(frame.queue_estimated_seconds)))
      .Add(absl::StrCat("launches ", CountText(frame.launches_per_second), "/s of ",
                        CountText(frame.calls_per_launch), " calls"))
      .Add(absl::StrCat("rejected ", CountText(frame.rejected_per_second), "/s"),
           frame.rejected_per_second > 0 ? Color::kYellow : Color::kNone);
  Line(out, columns, color)
      .Add(absl::StrCat("leases ", CountText(frame.leases), ", ", BytesText(frame.lease_bytes)))
      .Add(absl::StrCat("hits ", CountText(frame.lease_hits_per_second), "/s"))
      .Add(absl::StrCat("misses ", CountText(frame.lease_misses_per_second), "/s"))
      .Add(absl::StrCat("admitted ", BytesText(frame.admitted_bytes)));
  if (frame.modules > 0 || frame.module_rows_per_second > 0) {
    Line(out, columns, color)
        .Add(
            absl::StrCat("modules ", CountText(frame.modules), ", ", BytesText(frame.module_bytes)))
        .Add(absl::StrCat("rows ", CountText(frame.module_rows_per_second), "/s"))
        .Add(absl::StrCat("steps ", CountText(frame.module_steps_per_second), "/s"))
        .Add(FlopsText(frame.module_flops_per_second));
  }
  const double capacity = std::max(1.0, frame.staging_capacity_bytes);
  Line(out, columns, color)
      .Add(absl::StrCat("staging ", Bar(frame.staging_used_bytes / capacity, BarWidth(columns)),
                        " ", BytesText(frame.staging_used_bytes), " of ",
                        BytesText(frame.staging_capacity_bytes)));
}

void PrintDevice(const DeviceRow& row, std::ostream& out, bool color, int columns) {
  Line(out, columns, color)
      .Add(Shortened(row.device, 20), Color::kBold)
      .Add(row.up ? "up" : "LOST", row.up ? Color::kGreen : Color::kRed)
      .Add(FlopsText(row.flops_per_second))
      .Add(absl::StrCat("queue ", SecondsText(row.queue_estimated_seconds)))
      .Add(absl::StrCat("kernel p50 ", QuantileText(row.p50_seconds)))
      .Add(absl::StrCat("p99 ", QuantileText(row.p99_seconds)));
  if (row.hbm_reserved_bytes == 0) return;
  Line(out, columns, color)
      .Add(absl::StrCat("  compute ", Bar(row.compute_busy, BarWidth(columns)), " ",
                        PercentText(row.compute_busy)))
      .Add(absl::StrCat("h2d ", PercentText(row.h2d_busy)))
      .Add(absl::StrCat("d2h ", PercentText(row.d2h_busy)));
  const double used =
      row.hbm_input_bytes + row.hbm_output_bytes + row.hbm_workspace_bytes + row.hbm_lease_bytes;
  Line(out, columns, color)
      .Add(absl::StrCat("  hbm     ", Bar(used / row.hbm_reserved_bytes, BarWidth(columns)), " ",
                        BytesText(used), " of ", BytesText(row.hbm_reserved_bytes)))
      .Add(absl::StrCat("in ", BytesText(row.hbm_input_bytes)))
      .Add(absl::StrCat("out ", BytesText(row.hbm_output_bytes)))
      .Add(absl::StrCat("work ", BytesText(row.hbm_workspace_bytes)))
      .Add(absl::StrCat("leases ", BytesText(row.hbm_lease_bytes)));
}

Cell Errors(double per_second) {
  return Cell(CountText(per_second), per_second > 0 ? Color::kRed : Color::kNone);
}

void PrintMethods(const std::vector<MethodRow>& methods, std::ostream& out, bool color) {
  bool idle = true;
  Table table({"method", "calls/s", "errors", "open", "p50", "p99"});
  for (const MethodRow& row : methods) {
    if (row.calls_per_second == 0 && row.in_flight == 0) continue;
    idle = false;
    table.Add({Shortened(row.method, 15), CountText(row.calls_per_second),
               Errors(row.errors_per_second), CountText(row.in_flight),
               QuantileText(row.p50_seconds), QuantileText(row.p99_seconds)});
  }
  if (idle) return;
  out << "\n";
  table.Print(out, color);
}

void PrintCallers(const std::vector<CallerRow>& callers, std::ostream& out, bool color,
                  int columns) {
  std::vector<const CallerRow*> busy;
  double compute = 0;
  for (const CallerRow& row : callers) {
    if (row.calls_per_second > 0 || row.compute > 0) busy.push_back(&row);
    compute += row.compute;
  }
  if (busy.empty()) return;
  const bool wide = columns >= kWide;
  Table table({"caller", "calls/s", "errors", "bytes/s", "compute"});
  for (size_t n = 0; n < std::min(busy.size(), kMaxCallers); ++n) {
    const CallerRow& row = *busy[n];
    const double share = compute == 0 ? 0 : row.compute / compute;
    table.Add({Shortened(row.caller, wide ? 32 : 16), CountText(row.calls_per_second),
               Errors(row.errors_per_second), BytesText(row.bytes_per_second),
               absl::StrCat(Bar(share, wide ? 24 : 6), " ", PercentText(share))});
  }
  out << "\n";
  table.Print(out, color);
  if (busy.size() > kMaxCallers) out << "and " << busy.size() - kMaxCallers << " more\n";
}

}  // namespace

void TopFrame::Print(std::ostream& out, bool color, int columns) const {
  PrintTopSummary(*this, out, color, columns);
  if (!devices.empty()) out << "\n";
  for (const DeviceRow& row : devices) PrintDevice(row, out, color, columns);
  PrintMethods(methods, out, color);
  PrintCallers(callers, out, color, columns);
}

}  // namespace attnd
