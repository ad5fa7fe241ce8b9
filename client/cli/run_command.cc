#include "client/cli/run_command.h"

#include <filesystem>
#include <iostream>
#include <memory>
#include <system_error>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "attention/problem_text.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "client/cli/json_text.h"
#include "client/cli/printable.h"
#include "client/cli/problem_flags.h"
#include "client/cli/progress_bar.h"
#include "client/cli/table.h"
#include "client/cli/tensor_job.h"

namespace attnd {
namespace {

struct RunFlags {
  std::string in, out;
  ProblemFlags problem;
};

// The results would overwrite the tensors, under any name of the file.
absl::Status CheckApart(const RunFlags& flags) {
  std::error_code no_such_file;
  if (!std::filesystem::equivalent(flags.in, flags.out, no_such_file)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--out: expected another file than --in, got ", flags.out));
}

absl::Status WriteResults(const TensorJob& job, const std::string& path) {
  std::map<std::string, std::string> metadata = {{"problem", ProblemText(job.problem())},
                                                 {"backend", job.receipt().backend},
                                                 {"kernel", job.receipt().kernel}};
  std::string bytes = SerializeSafetensors(job.Results(), metadata);
  return WriteWholeFile(path, bytes);
}

void PrintSummary(const Session& session, const TensorJob& job, const std::string& path) {
  const CallReceipt& r = job.receipt();
  if (session.json()) {
    nlohmann::ordered_json out = {{"problem", ProblemText(job.problem())},
                                  {"out", path},
                                  {"backend", r.backend},
                                  {"kernel", r.kernel},
                                  {"shards", r.shards},
                                  {"seconds", absl::ToDoubleSeconds(r.elapsed)}};
    for (const auto& [name, tensor] : job.Results()) out["tensors"][name] = tensor.shape;
    std::cout << JsonText(out) << "\n";
    return;
  }
  std::cout << ProblemText(job.problem()) << "\n" << path << ":";
  for (const auto& [name, tensor] : job.Results()) std::cout << " " << name;
  std::cout << "\n"
            << Printable(r.backend) << " " << Printable(r.kernel) << ", " << r.shards << " shards, "
            << SecondsText(absl::ToDoubleSeconds(r.elapsed)) << "\n";
}

absl::Status RunFile(Session& session, const RunFlags& flags) {
  ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Read(flags.in));
  ASSIGN_OR_RETURN(TensorJob job, TensorJob::Make(file, flags.problem));
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  {
    ProgressBar bar("shards", 100, session.shows_progress());
    CallOptions options{.progress = [&](const Progress& now) {
      bar.Show(100 * now.shards_done / now.shards_total);
    }};
    RETURN_IF_ERROR(job.Run(*client, options));
  }
  RETURN_IF_ERROR(WriteResults(job, flags.out));
  PrintSummary(session, job, flags.out);
  return absl::OkStatus();
}

}  // namespace

void AddRunCommand(CLI::App& app, Session& session) {
  auto flags = std::make_shared<RunFlags>();  // shared with the callback, which outlives this
  CLI::App* command = app.add_subcommand("run", "Attention on the tensors of a safetensors file");
  command->add_option("--in", flags->in, "file with q, k, v and what else applies")->required();
  command->add_option("--out", flags->out, "file for the results")->required();
  flags->problem.AddTo(*command);
  command->footer(
      "Tensors read: q, k, v; optional bias, mask, kv_lengths, offsets, cu_seqlens_q, "
      "cu_seqlens_k,\n"
      "alibi_slopes, sink_logits. With dout (and optionally o, lse, dlse) gradients are computed.\n"
      "Tensors written: o, lse, and dq, dk, dv, dbias, dsink with dout. The file's __metadata__ "
      "may\n"
      "hold the flags above (\"causal\": \"bottom_right\"); the command line wins.\n\n"
      "Example:\n  attnctl run --in x.safetensors --out y.safetensors --causal bottom_right");
  command->callback([&session, flags] {
    absl::Status apart = CheckApart(*flags);
    if (!apart.ok()) return session.FailUsage(apart);
    absl::Status status = RunFile(session, *flags);
    if (!status.ok()) session.Fail(status);
  });
}

}  // namespace attnd
