// mask_wire: what a mask by description costs a call beside `causal`: on the wire, and in time. The
// mask is a list of 210,000 blocks of 4 × 4 (0.84 MB), N = 2592; the call itself is small (one
// head, D = 1). The daemon computes nothing (null_attnd), so that its own work is what is left:
// decoding, the look-up of the mask and of its tiles, admission.
//
//     bazel build //tools/benchmarks:null_attnd //tools/benchmarks:mask_wire
//     bazel-bin/tools/benchmarks/mask_wire bazel-bin/tools/benchmarks/null_attnd
//
// The mask's bars: at most 64 bytes and 5 us of p50 above `causal`, from the second call on.
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "client/attention_client.h"
#include "client/cli/metrics_text.h"
#include "client/masks/mask_builder.h"
#include "net/process_tuning.h"
#include "tools/benchmarks/turns.h"

namespace attnd {
namespace {

constexpr int64_t kLength = 2592;
constexpr char kListen[] = "127.0.0.1:17090", kMetrics[] = "127.0.0.1:17091";

Problem Call() { return PlainProblem(1, 1, kLength, 1); }

// Half of the blocks.
Problem WithBlocks(Problem p) {
  constexpr uint32_t kBlock = 4;
  BlockList list = {.bq = kBlock, .bk = kBlock, .indptr = {0}};
  Random random(1);
  for (int64_t row = 0; row < kLength / kBlock; ++row) {
    for (uint32_t column = 0; column < kLength / kBlock; ++column) {
      if (random.Chance(0.5)) list.indices.push_back(column);
    }
    list.indptr.push_back(static_cast<uint32_t>(list.indices.size()));
  }
  const absl::Status status = masks::SetMask(masks::Mask(std::move(list)).Spec(), p);
  CHECK(status.ok()) << status;
  return p;
}

class Caller {
 public:
  Caller(AttentionClient& client, Problem problem)
      : client_(client),
        p_(std::move(problem)),
        in_(RandomInputs(p_, 1)),
        o_(p_.OutputElements() * 4) {}
  void operator()() {
    auto receipt = client_.Forward(p_, {.q = in_.q.data(), .k = in_.k.data(), .v = in_.v.data()},
                                   {.o = o_.data()});
    CHECK(receipt.ok()) << receipt.status();
  }

 private:
  AttentionClient& client_;
  const Problem p_;
  const ProblemInputs in_;
  AlignedBytes o_;
};

double ReceivedBytes() {
  const auto text = FetchMetrics(absl::StrCat("http://", kMetrics, "/metrics"), absl::Seconds(10));
  CHECK(text.ok()) << text.status();
  const auto metrics = MetricsText::Parse(*text);
  CHECK(metrics.ok()) << metrics.status();
  return metrics->Sum("attnd_received_bytes_total", {});
}

double BytesOf(Caller& caller) {
  const double before = ReceivedBytes();
  caller();
  return ReceivedBytes() - before;
}

int Main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s path/to/null_attnd\n", argv[0]);
    return 2;
  }
  ServerProcess daemon({argv[1], "--listen", kListen, "--metrics_listen", kMetrics, "--log_level",
                        "error", "--drain_delay", "0"});
  auto client = AttentionClient::Connect(
      {.addresses = {kListen}, .channels_per_address = 1, .wait_for_ready = true});
  CHECK(client.ok()) << client.status();
  CHECK((*client)->GetServerInfo().ok());
  Problem causal = Call();
  causal.causal = true;
  Caller plain(**client, causal), masked(**client, WithBlocks(Call()));
  plain();
  const absl::Time start = absl::Now();
  const double first = BytesOf(masked);
  const double first_ms = absl::ToDoubleMilliseconds(absl::Now() - start);
  const double second = BytesOf(masked), without = BytesOf(plain);
  std::printf(
      "request bytes: causal %.0f; the mask's first call %.0f (%.1f ms), then %.0f: %+.0f\n",
      without, first, first_ms, second, second - without);
  std::vector<Way> ways;
  ways.push_back({"causal", [&] { plain(); }, &daemon});
  ways.push_back({"mask, by id", [&] { masked(); }, &daemon});
  ways.push_back({"causal again", [&] { plain(); }, &daemon});
  Compare("us", ways);
  std::printf("p50 above causal: %+.1f us (causal against itself: %+.1f us)\n",
              ways[1].At(0.5) - ways[0].At(0.5), ways[2].At(0.5) - ways[0].At(0.5));
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  return attnd::Main(argc, argv);
}
