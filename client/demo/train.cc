// Trains a small character transformer on a text, with all of its attention on a daemon, and the
// same transformer beside it on local float64 attention; the two loss curves must agree.
//
//     train --address 127.0.0.1:7070
//
// Exit status: 0 the loss fell and the curves agree; 1 they do not; 2 the training could not run.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/demo/remote_attention.h"
#include "client/demo/text.h"
#include "client/demo/training.h"

namespace attnd::demo {
namespace {

struct Options {
  std::string address = "127.0.0.1:7070";
  std::string text = "/usr/share/common-licenses/GPL-3";
  TrainingOptions training = {
      .shape = {.context = 64, .layers = 2, .heads = 4, .head_dim = 32, .dropout = 0.1f}};
  // float32 attention was seen to deviate by 3e-6; wrong attention deviates by more than 1e-2
  // (training_test).
  double tolerance = 1e-3;
};

// A bar that redraws itself on a terminal and a line every tenth elsewhere.
void ShowProgress(int64_t steps, absl::Time start, const LossCurves& curves) {
  int64_t done = static_cast<int64_t>(curves.tested.size());
  bool terminal = isatty(STDOUT_FILENO);
  if (!terminal && done != 1 && done % std::max<int64_t>(steps / 10, 1) != 0) return;
  int filled = static_cast<int>(30 * done / steps);
  double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  double left = seconds / static_cast<double>(done) * static_cast<double>(steps - done);
  absl::PrintF("%s[%s%s] step %4d/%d  loss %.4f, local float64 %.4f  %3.0f s left%s",
               terminal ? "\r" : "", std::string(filled, '#'), std::string(30 - filled, '.'), done,
               steps, curves.tested.back(), curves.local.back(), left,
               terminal && done < steps ? "" : "\n");
  std::fflush(stdout);
}

int Report(const Options& options, const LossCurves& curves, const RemoteAttention& remote) {
  double deviation = curves.LargestDeviation();
  bool fell = curves.Last() < 0.9 * curves.First(), agrees = deviation <= options.tolerance;
  absl::PrintF("Attention calls to %s: %d (last %s), %.1f MB both ways, %.2f ms each\n",
               options.address, remote.calls(), remote.kernel(),
               static_cast<double>(remote.bytes()) / 1e6,
               absl::ToDoubleMilliseconds(remote.elapsed()) / static_cast<double>(remote.calls()));
  absl::PrintF("Loss in nats a character: %.4f at first, %.4f at last: %s\n", curves.First(),
               curves.Last(), fell ? "it fell" : "IT DID NOT FALL");
  absl::PrintF("Largest deviation from local float64 attention: %.2g (allowed %.2g): %s\n",
               deviation, options.tolerance, agrees ? "the curves agree" : "THEY DIFFER");
  return fell && agrees ? 0 : 1;
}

absl::StatusOr<int> Run(const Options& options) {
  absl::StatusOr<CharacterText> text = CharacterText::FromFile(options.text);
  if (!text.ok()) return text.status();
  const TrainingOptions& training = options.training;
  if (text->characters() <= training.shape.context) {
    return absl::InvalidArgumentError(
        absl::StrFormat("text: expected more than %d characters, got %d", training.shape.context,
                        text->characters()));
  }
  ClientOptions client_options;
  client_options.addresses = {options.address};
  auto client = AttentionClient::Connect(client_options);
  if (!client.ok()) return client.status();
  RemoteAttention remote(*std::move(client));
  absl::PrintF("%s: %d characters, %d distinct; a step takes %d sequences of %d\n", options.text,
               text->characters(), text->vocabulary(), training.batch, training.shape.context);
  absl::Time start = absl::Now();
  absl::StatusOr<LossCurves> curves =
      TrainTwice(training, *text, remote,
                 [&](const LossCurves& so_far) { ShowProgress(training.steps, start, so_far); });
  if (!curves.ok()) return curves.status();
  return Report(options, *curves, remote);
}

void AddOptions(CLI::App& app, Options& options) {
  TrainingOptions& training = options.training;
  auto add = [&](const char* name, auto& value, const char* help, double least, double most) {
    app.add_option(name, value, help)->check(CLI::Range(least, most))->capture_default_str();
  };
  app.add_option("--address", options.address, "of the daemon")->capture_default_str();
  app.add_option("--text", options.text, "file to learn")->capture_default_str();
  add("--steps", training.steps, "of the optimiser", 1, 1e6);
  add("--batch", training.batch, "sequences a step", 1, 1024);
  add("--context", training.shape.context, "characters a sequence", 1, 1024);
  add("--layers", training.shape.layers, "of the transformer", 1, 16);
  add("--heads", training.shape.heads, "a layer", 1, 64);
  add("--head_dim", training.shape.head_dim, "numbers a head", 1, 256);
  add("--dropout", training.shape.dropout, "of attention's probabilities", 0, 0.99);
  add("--tolerance", options.tolerance, "largest deviation of the loss allowed", 0, 1e3);
  app.add_option("--seed", training.seed, "of weights, text and dropout")->capture_default_str();
}

}  // namespace
}  // namespace attnd::demo

int main(int argc, char** argv) {
  attnd::demo::Options options;
  CLI::App app("Trains a small character transformer whose attention runs on an attnd daemon.");
  attnd::demo::AddOptions(app, options);
  try {  // CLI11 tells of wrong usage and --help by exceptions
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::cerr << "train: " << error.what() << "\n";
    return 2;
  }
  absl::StatusOr<int> status = attnd::demo::Run(options);
  if (status.ok()) return *status;
  std::cerr << "train: " << status.status() << "\n";
  return 2;
}
