#include "client/cli/mask/mask_command.h"

#include <iostream>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "attention/mask_plans.h"
#include "attention/masks/mask_description.h"
#include "attention/problem_text.h"
#include "base/status_macros.h"
#include "client/cli/json_text.h"
#include "client/cli/mask/mask_picture.h"
#include "client/cli/printable.h"
#include "client/cli/problem_flags.h"
#include "client/cli/table.h"
#include "client/masks/mask_text.h"

namespace attnd {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kTextRows = 32, kTextColumns = 64, kPixels = 1024;

struct MaskFlags {
  std::string mask;
  ProblemFlags options;
  SizeFlags sizes;
  bool local = false;
  std::string png;
};

double Scores(const Problem& p) {
  return static_cast<double>(p.batch * p.q_heads) *
         static_cast<double>(p.MaxQueryLength() * p.MaxKeyLength());
}

// Compiles the mask on this machine, and reports as a daemon does.
absl::StatusOr<MaskReport> CompileHere(const Problem& problem) {
  MaskPlans plans;
  ASSIGN_OR_RETURN(const auto compiled, plans.Get(problem, HostMaskOptions()));
  const MaskTotals totals = TotalsOf(*compiled, problem);
  MaskReport report;
  report.id = problem.mask->id();
  report.bytes_held = problem.mask->bytes() + compiled->bytes();
  report.visible = totals.visible;
  report.empty_rows = totals.empty_rows;
  report.devices.push_back({.device = "here",
                            .kernel_forward = "-",
                            .kernel_backward = "-",
                            .reason = "compiled by attnctl",
                            .tile_rows = kHostMaskTile.rows,
                            .tile_keys = kHostMaskTile.keys,
                            .tiles = totals.tiles,
                            .tiles_full = totals.tiles_full,
                            .tiles_partial = totals.tiles_partial,
                            .distinct_bitmaps = totals.distinct_bitmaps,
                            .plan_bytes = compiled->bytes(),
                            .compile_nanoseconds = compiled->compile_nanoseconds()});
  return report;
}

absl::StatusOr<MaskReport> Report(Session& session, const MaskFlags& flags,
                                  const Problem& problem) {
  if (flags.local) return CompileHere(problem);
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  return client->CompileMask(problem);
}

std::string IdText(const MaskId& id) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(id.data()), id.size()});
}

Json ToJson(const MaskFlags& flags, const Problem& problem, const MaskReport& report) {
  Json devices = Json::array();
  for (const MaskOnDevice& d : report.devices) {
    devices.push_back({{"device", d.device},
                       {"kernel_forward", d.kernel_forward},
                       {"kernel_backward", d.kernel_backward},
                       {"reason", d.reason},
                       {"tile", {d.tile_rows, d.tile_keys}},
                       {"tiles", d.tiles},
                       {"tiles_full", d.tiles_full},
                       {"tiles_partial", d.tiles_partial},
                       {"distinct_bitmaps", d.distinct_bitmaps},
                       {"plan_bytes", d.plan_bytes},
                       {"compile_seconds", static_cast<double>(d.compile_nanoseconds) * 1e-9}});
  }
  return {{"problem", ProblemText(problem)},
          {"mask", flags.mask},
          {"id", IdText(report.id)},
          {"bytes_held", report.bytes_held},
          {"visible", report.visible},
          {"density", static_cast<double>(report.visible) / Scores(problem)},
          {"empty_rows", report.empty_rows},
          {"devices", devices}};
}

void PrintDevices(const MaskReport& report, bool color) {
  Table table({"device", "forward", "backward", "tile", "tiles", "full", "partial", "visited",
               "bitmaps", "plan", "compiled in"});
  for (const MaskOnDevice& d : report.devices) {
    if (d.kernel_forward.empty()) continue;
    const double visited = static_cast<double>(d.tiles_full + d.tiles_partial);
    table.Add({d.device, d.kernel_forward, d.kernel_backward,
               absl::StrCat(d.tile_rows, "x", d.tile_keys), absl::StrCat(d.tiles),
               absl::StrCat(d.tiles_full), absl::StrCat(d.tiles_partial),
               absl::StrCat(NumberText(100 * visited / static_cast<double>(d.tiles)), " %"),
               absl::StrCat(d.distinct_bitmaps), BytesText(static_cast<double>(d.plan_bytes)),
               SecondsText(static_cast<double>(d.compile_nanoseconds) * 1e-9)});
  }
  table.Print(std::cout, color);
  for (const MaskOnDevice& d : report.devices) {
    std::cout << Printable(d.device) << ": " << Printable(d.reason) << "\n";
  }
}

absl::Status Print(const Session& session, const MaskFlags& flags, const Problem& problem,
                   const MaskReport& report) {
  if (session.json()) {
    std::cout << JsonText(ToJson(flags, problem, report)) << "\n";
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const MaskPicture picture, MaskPicture::Draw(problem, kTextRows, kTextColumns));
  const double density = static_cast<double>(report.visible) / Scores(problem);
  std::cout << ProblemText(problem) << "\nmask " << flags.mask << ", id " << IdText(report.id)
            << "\n"
            << report.visible << " scores visible, " << NumberText(100 * density) << " %; "
            << report.empty_rows << " rows see nothing; "
            << BytesText(static_cast<double>(report.bytes_held)) << " held\n\n";
  PrintDevices(report, session.color());
  std::cout << "\nbatch entry 0, head 0, rows down and keys across: # all of a cell is visible, + "
               "some, . nothing\n"
            << picture.Text();
  return absl::OkStatus();
}

void RunMask(Session& session, const MaskFlags& flags) {
  absl::StatusOr<Problem> problem = flags.sizes.MakeProblem(flags.options);
  if (!problem.ok()) return session.FailUsage(problem.status());
  const absl::Status status = ApplyMask("mask", flags.mask, *problem);
  if (!status.ok()) return session.FailUsage(status);
  const absl::StatusOr<MaskReport> report = Report(session, flags, *problem);
  if (!report.ok()) return session.Fail(report.status());
  const absl::Status printed = Print(session, flags, *problem, *report);
  if (!printed.ok()) return session.Fail(printed);
  if (flags.png.empty()) return;
  const absl::StatusOr<MaskPicture> picture = MaskPicture::Draw(*problem, kPixels, kPixels);
  const absl::Status written = picture.ok() ? picture->WritePng(flags.png) : picture.status();
  if (!written.ok()) session.Fail(written);
}

}  // namespace

void AddMaskCommand(CLI::App& app, Session& session) {
  auto flags = std::make_shared<MaskFlags>();  // shared with the callback, which outlives this
  CLI::App* command =
      app.add_subcommand("mask", "What a mask by description shows and costs, and a picture of it");
  command->add_option("mask", flags->mask, "the mask, see below")->required();
  flags->sizes.AddTo(*command);
  command->add_flag("--local", flags->local, "compile it here, without a daemon");
  command->add_option("--png", flags->png, "write a picture too, up to 1024 x 1024 pixels")
      ->type_name("FILE");
  flags->options.AddTo(*command);
  command->footer(absl::StrCat(
      "Masks compose by ~, & and |, in this order, and parentheses. Exit code 2 for a mask that is "
      "wrong.\n\n",
      masks::MaskNamesHelp(),
      "\nExamples:\n"
      "  attnctl mask 'longformer(64,64)' --shape 1,8,4096,64\n"
      "  attnctl mask 'causal & (window(127,0) | stride(128))' --local --png mask.png"));
  command->callback([&session, flags] { RunMask(session, *flags); });
}

}  // namespace attnd
