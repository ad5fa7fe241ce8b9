#include "client/cli/check_command.h"

#include <algorithm>
#include <atomic>
#include <iostream>
#include <map>
#include <memory>
#include <thread>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "base/cpu_quota.h"
#include "base/status_macros.h"
#include "client/cli/json_text.h"
#include "client/cli/numeric_check.h"
#include "client/cli/problem_flags.h"
#include "client/cli/progress_bar.h"
#include "client/cli/table.h"

namespace attnd {
namespace {

using Json = nlohmann::ordered_json;

struct CheckFlags {
  int count = 200;
  uint64_t seed = 1;
  int64_t max_pairs = 1 << 12;
  int64_t max_head_dim = kMaxHeadDim;
  bool masks = false;
  std::string mask;  // the one for all; empty: of every kind
};

// The results of one group of cases.
struct Group {
  int cases = 0, unsupported = 0, failed = 0;
  double worst_forward = 0, worst_backward = 0, absolute_error = 0;

  void Add(const CheckedCase& c) {
    ++cases;
    if (c.forward.unsupported || c.backward.unsupported) ++unsupported;
    worst_forward = std::max(worst_forward, c.forward.error_in_bounds);
    worst_backward = std::max(worst_backward, c.backward.error_in_bounds);
    absolute_error =
        std::max({absolute_error, c.forward.absolute_error, c.backward.absolute_error});
    if (HasFailed(c)) ++failed;
  }
  static bool HasFailed(const CheckedCase& c) {
    return !c.forward.status.ok() || !c.backward.status.ok() || c.forward.error_in_bounds > 1 ||
           c.backward.error_in_bounds > 1;
  }
};

// INVALID_ARGUMENT when the mask does not fit the seed's sizes.
absl::StatusOr<Problem> ProblemOf(const CheckFlags& flags, uint64_t seed) {
  const bool any_mask = flags.masks && flags.mask.empty();
  Problem p = RandomProblem(
      seed, {.max_pairs = flags.max_pairs, .max_head_dim = flags.max_head_dim, .masks = any_mask});
  if (flags.mask.empty()) return p;
  p.bool_mask.reset();
  if (p.alignment == Alignment::kUnspecified) p.alignment = Alignment::kTopLeft;
  RETURN_IF_ERROR(ApplyMask("--mask", flags.mask, p));
  return p;
}

// The first ones whose problems the mask fits.
absl::StatusOr<std::vector<uint64_t>> SeedsOf(const CheckFlags& flags) {
  constexpr uint64_t kTries = 20;
  std::vector<uint64_t> seeds;
  absl::Status misfit;
  const uint64_t end = flags.seed + kTries * static_cast<uint64_t>(flags.count);
  for (uint64_t seed = flags.seed; seed != end && std::ssize(seeds) < flags.count; ++seed) {
    if (!flags.mask.empty()) misfit = ProblemOf(flags, seed).status();
    if (misfit.ok()) seeds.push_back(seed);
  }
  if (seeds.empty()) return misfit;
  return seeds;
}

std::vector<CheckedCase> RunCases(AttentionClient& client, const CheckFlags& flags,
                                  const std::vector<uint64_t>& seeds, bool shows_progress) {
  const int count = static_cast<int>(seeds.size());
  std::vector<CheckedCase> cases(seeds.size());
  ProgressBar bar("checking", count, shows_progress);
  std::atomic<int> next{0}, done{0};
  auto work = [&] {
    for (int n = next++; n < count; n = next++) {
      cases[n] = CheckCase(client, *ProblemOf(flags, seeds[n]), seeds[n]);
      bar.Show(++done);
    }
  };
  std::vector<std::thread> threads;
  for (int n = 1; n < AvailableCpus(); ++n) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return cases;
}

std::string FailureText(const CheckedCase& c) {
  const CheckOutcome& o =
      !c.forward.status.ok() || c.forward.error_in_bounds > 1 ? c.forward : c.backward;
  std::string what = o.status.ok() ? absl::StrCat(o.worst_tensor, " is off by ",
                                                  NumberText(o.error_in_bounds), " bounds")
                                   : o.status.ToString();
  return absl::StrCat("seed ", c.seed, ": ", what, ": ", ProblemText(c.problem));
}

void PrintTable(const std::map<std::string, Group>& groups, bool color) {
  Table table({"option", "cases", "unsupported", "forward", "backward", "max error", "verdict"});
  for (const std::string& name : AllFeatures()) {
    auto it = groups.find(name);
    if (it == groups.end()) continue;
    const Group& g = it->second;
    table.Add({name, absl::StrCat(g.cases), absl::StrCat(g.unsupported),
               NumberText(g.worst_forward), NumberText(g.worst_backward),
               NumberText(g.absolute_error),
               g.failed > 0               ? Cell(absl::StrCat(g.failed, " WRONG"), Color::kRed)
               : g.unsupported == g.cases ? Cell("not supported", Color::kYellow)
                                          : Cell("ok", Color::kGreen)});
  }
  table.Print(std::cout, color);
}

Json ToJson(const std::map<std::string, Group>& groups, const std::vector<CheckedCase>& cases) {
  Json out;
  for (const std::string& name : AllFeatures()) {
    auto it = groups.find(name);
    if (it == groups.end()) continue;
    const Group& g = it->second;
    out["groups"].push_back({{"option", name},
                             {"cases", g.cases},
                             {"unsupported", g.unsupported},
                             {"failed", g.failed},
                             {"forward_error_in_bounds", g.worst_forward},
                             {"backward_error_in_bounds", g.worst_backward},
                             {"max_absolute_error", g.absolute_error}});
  }
  out["failures"] = Json::array();
  for (const CheckedCase& c : cases) {
    if (Group::HasFailed(c)) out["failures"].push_back(FailureText(c));
  }
  return out;
}

// Without a server every case would fail: say so once.
absl::Status Reachable(AttentionClient& client) { return client.GetServerInfo().status(); }

void RunCheck(Session& session, const CheckFlags& flags) {
  const absl::StatusOr<std::vector<uint64_t>> seeds = SeedsOf(flags);
  if (!seeds.ok()) return session.FailUsage(seeds.status());
  auto client = session.Connect();
  if (!client.ok()) return session.Fail(client.status());
  absl::Status reachable = Reachable(**client);
  if (!reachable.ok()) return session.Fail(reachable);
  absl::Time start = absl::Now();
  std::vector<CheckedCase> cases = RunCases(**client, flags, *seeds, session.shows_progress());
  std::map<std::string, Group> groups;
  for (const CheckedCase& c : cases) {
    for (const std::string& name : FeaturesOf(c.problem)) groups[name].Add(c);
  }
  if (session.json()) {
    std::cout << JsonText(ToJson(groups, cases)) << "\n";
  } else {
    PrintTable(groups, session.color());
    std::cout << "forward, backward: the largest error in units of what rounding explains "
                 "(docs/NUMERICS.md); at most 1 is right.\n"
              << cases.size() << " problems from seed " << flags.seed << " in "
              << SecondsText(absl::ToDoubleSeconds(absl::Now() - start)) << "\n";
    int shown = 0;
    for (const CheckedCase& c : cases) {
      if (Group::HasFailed(c) && ++shown <= 10) std::cout << FailureText(c) << "\n";
    }
  }
  // Nothing that the daemon supports means that nothing was checked.
  const Group& all = groups["all"];
  if (all.failed > 0 || all.unsupported == all.cases) session.Exit(kExitNo);
}

}  // namespace

void AddCheckCommand(CLI::App& app, Session& session) {
  auto flags = std::make_shared<CheckFlags>();  // shared with the callback, which outlives this
  CLI::App* command = app.add_subcommand(
      "check", "Compare the daemon with exact attention on random problems over all options");
  command->add_option("--count", flags->count, "problems, each forward and backward")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  command->add_option("--seed", flags->seed, "of the first problem; the next ones follow")
      ->capture_default_str();
  command
      ->add_option("--max-size", flags->max_pairs, "most pairs of a query and a key in a problem")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--max-head-dim", flags->max_head_dim, "largest head dimension")
      ->check(CLI::Range(int64_t{1}, kMaxHeadDim))
      ->capture_default_str();
  command
      ->add_option("--mask", flags->mask,
                   "each problem with a mask by description: of every kind, or this one, where it "
                   "fits; attnctl mask --help lists how it is spelled")
      ->expected(0, 1)
      ->type_name("[MASK]");
  command->footer(
      "Exit code 0 when every element lies within its bound, 1 otherwise.\n\n"
      "Examples:\n  attnctl check\n  attnctl check --count 5000 --max-size 65536\n"
      "  attnctl check --mask                       # masks of every kind\n"
      "  attnctl check --mask 'longformer(8,2)'\n"
      "  attnctl check --seed 17 --count 1    # one case again");
  command->callback([&session, flags, command] {
    flags->masks = command->count("--mask") > 0;
    RunCheck(session, *flags);
  });
}

}  // namespace attnd
