// Trains a small character transformer on a text, with all of its attention on a daemon, and the
// same transformer beside it on local float64 attention; the two loss curves must agree.
//
//     train --address 127.0.0.1:7070
//
// Exit status: 0 the loss fell and the curves agree; 1 they do not; 2 the training could not run.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <future>
#include <iostream>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/demo/adamw.h"
#include "client/demo/local_attention.h"
#include "client/demo/remote_attention.h"
#include "client/demo/text.h"
#include "client/demo/transformer.h"

namespace attnd::demo {
namespace {

struct Options {
  std::string address = "127.0.0.1:7070";
  std::string text = "/usr/share/common-licenses/GPL-3";
  int64_t steps = 300;
  int64_t batch = 8;
  TransformerShape shape = {
      .context = 64, .layers = 2, .heads = 4, .head_dim = 32, .dropout = 0.1f};
  double tolerance = 0.02;
  uint64_t seed = 1;
};

// One model with its optimiser and its source of attention.
class Training {
 public:
  Training(const Options& options, const TransformerShape& shape, AttentionSource& attention)
      : options_(options),
        model_(shape, options.seed),
        attention_(attention),
        optimiser_(model_.parameters(), {}) {}

  // The loss before the step. The rate falls from 1 to 0.1 along a half cosine.
  absl::StatusOr<double> Step(int64_t step, const TextBatch& batch) {
    absl::StatusOr<double> loss =
        model_.LossAndGradients(batch, static_cast<uint64_t>(step), attention_);
    double done = static_cast<double>(step) / static_cast<double>(options_.steps);
    if (loss.ok()) optimiser_.Step(0.55 + 0.45 * std::cos(M_PI * done));
    return loss;
  }
  int64_t ParameterCount() const { return model_.ParameterCount(); }

 private:
  const Options& options_;
  Transformer model_;
  AttentionSource& attention_;
  AdamW optimiser_;
};

struct Curves {
  std::vector<double> daemon, local;
  double LargestDeviation() const {
    double largest = 0;
    for (size_t i = 0; i < daemon.size(); ++i) {
      // Written so that NaN counts as a deviation.
      double deviation = std::abs(daemon[i] - local[i]);
      if (!(deviation <= largest)) largest = deviation;
    }
    return largest;
  }
};

// A bar that redraws itself on a terminal and a line every tenth elsewhere.
void ShowProgress(const Options& options, const Curves& curves, absl::Time start) {
  int64_t done = static_cast<int64_t>(curves.daemon.size());
  bool terminal = isatty(STDOUT_FILENO);
  if (!terminal && done != 1 && done % std::max<int64_t>(options.steps / 10, 1) != 0) return;
  int filled = static_cast<int>(30 * done / options.steps);
  double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  double left = seconds / static_cast<double>(done) * static_cast<double>(options.steps - done);
  absl::PrintF("%s[%s%s] step %4d/%d  loss %.4f, local float64 %.4f  %3.0f s left%s",
               terminal ? "\r" : "", std::string(filled, '#'), std::string(30 - filled, '.'), done,
               options.steps, curves.daemon.back(), curves.local.back(), left,
               terminal && done < options.steps ? "" : "\n");
  std::fflush(stdout);
}

absl::StatusOr<Curves> Run(const Options& options, const CharacterText& text,
                           AttentionSource& remote) {
  TransformerShape shape = options.shape;
  shape.vocabulary = text.vocabulary();
  LocalAttention reference;
  Training on_daemon(options, shape, remote), on_reference(options, shape, reference);
  absl::PrintF(
      "Training %d parameters on %s (%d characters, %d distinct), %d sequences of %d a step\n",
      on_daemon.ParameterCount(), options.text, text.characters(), text.vocabulary(), options.batch,
      shape.context);
  std::mt19937_64 random(options.seed);
  Curves curves;
  absl::Time start = absl::Now();
  for (int64_t step = 0; step < options.steps; ++step) {
    TextBatch batch = text.RandomBatch(options.batch, shape.context, random);
    auto local = std::async(std::launch::async, [&] { return on_reference.Step(step, batch); });
    absl::StatusOr<double> daemon_loss = on_daemon.Step(step, batch);
    absl::StatusOr<double> local_loss = local.get();
    if (!daemon_loss.ok()) return daemon_loss.status();
    if (!local_loss.ok()) return local_loss.status();
    curves.daemon.push_back(*daemon_loss);
    curves.local.push_back(*local_loss);
    ShowProgress(options, curves, start);
  }
  return curves;
}

// Mean of the first or last tenth: single steps see different text.
double Mean(const std::vector<double>& losses, bool last) {
  size_t count = std::max<size_t>(losses.size() / 10, 1);
  auto first = last ? losses.end() - static_cast<int64_t>(count) : losses.begin();
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += first[static_cast<int64_t>(i)];
  return sum / static_cast<double>(count);
}

int Report(const Options& options, const Curves& curves, const RemoteAttention& remote) {
  double first = Mean(curves.daemon, false), last = Mean(curves.daemon, true);
  double deviation = curves.LargestDeviation();
  bool fell = last < 0.8 * first, agrees = deviation <= options.tolerance;
  absl::PrintF("Attention calls to %s: %d (%s), %.1f MB both ways, %.2f ms each\n", options.address,
               remote.calls(), remote.kernel(), static_cast<double>(remote.bytes()) / 1e6,
               absl::ToDoubleMilliseconds(remote.elapsed()) / static_cast<double>(remote.calls()));
  absl::PrintF("Loss in nats a character: %.4f at first, %.4f at last: %s\n", first, last,
               fell ? "it fell" : "IT DID NOT FALL");
  absl::PrintF("Largest deviation from local float64 attention: %.2g (allowed %.2g): %s\n",
               deviation, options.tolerance, agrees ? "the curves agree" : "THEY DIFFER");
  return fell && agrees ? 0 : 1;
}

int Main(const Options& options) {
  absl::StatusOr<CharacterText> text = CharacterText::FromFile(options.text);
  ClientOptions client_options;
  client_options.addresses = {options.address};
  auto client = AttentionClient::Connect(client_options);
  absl::Status status = !text.ok() ? text.status() : client.status();
  if (status.ok()) {
    RemoteAttention remote(*std::move(client));
    absl::StatusOr<Curves> curves = Run(options, *text, remote);
    if (curves.ok()) return Report(options, *curves, remote);
    status = curves.status();
  }
  std::cerr << "train: " << status << "\n";
  return 2;
}

}  // namespace
}  // namespace attnd::demo

int main(int argc, char** argv) {
  attnd::demo::Options options;
  CLI::App app("Trains a small character transformer whose attention runs on an attnd daemon.");
  app.add_option("--address", options.address, "of the daemon")->capture_default_str();
  app.add_option("--text", options.text, "file to learn")->capture_default_str();
  app.add_option("--steps", options.steps)->check(CLI::Range(1, 1000000))->capture_default_str();
  app.add_option("--batch", options.batch, "sequences a step")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--context", options.shape.context, "characters a sequence")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--layers", options.shape.layers)->check(CLI::Range(1, 16))->capture_default_str();
  app.add_option("--heads", options.shape.heads)->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--head_dim", options.shape.head_dim)
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--dropout", options.shape.dropout, "of attention's probabilities")
      ->check(CLI::Range(0.0, 0.99))
      ->capture_default_str();
  app.add_option("--tolerance", options.tolerance, "largest deviation of the loss allowed")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--seed", options.seed, "of weights, text and dropout")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return attnd::demo::Main(options);
}
