// engine_error: an engine's error against the float64 reference, as one line of a Markdown table
// for each tensor: largest absolute error, mean absolute error, and mean relative error Σ|error| /
// Σ|exact|.
//
//     engine_error --engine emulated_sm70 --element float16 --accumulate float16 --length 512
//
// emulated_sm70 is the Volta kernels' own source, run lane by lane on this processor: products and
// sums are rounded as the code says, exponentials are this processor's. One thread. Exits 1 when a
// launch fails or the engine refuses the problem.
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "attention/random_problem.h"
#include "attention/reference.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/reference_backend.h"
#include "tests/emulator/device/emulated_engine.h"

namespace attnd {
namespace {

struct Options {
  std::string engine = "cpu", element = "float16", accumulate = "float32", values = "normal";
  int64_t length = 512, head_dim = 64, heads = 1;
  uint64_t seed = 1;
  bool causal = false;
};

std::unique_ptr<Backend> MakeEngine(const std::string& name) {
  if (name == "reference") return std::make_unique<ReferenceBackend>();
  if (name == "cpu") return MakeCpuBackend({});
  return cuda::MakeEmulatedEngine();
}

Problem ProblemOf(const Options& options) {
  Problem p = PlainProblem(1, options.heads, options.length, options.head_dim);
  p.causal = options.causal;
  p.element = ElementType::kFloat32;
  if (options.element == "float16") p.element = ElementType::kFloat16;
  if (options.element == "bfloat16") p.element = ElementType::kBFloat16;
  if (options.accumulate == "float16") p.accumulate = AccumulateType::kFloat16;
  return p;
}

void PrintError(const Options& options, const LaunchReport& report, const std::string& tensor,
                ElementType element, const AlignedBytes& got, const std::vector<double>& exact) {
  double largest = 0, sum = 0, magnitude = 0;
  for (size_t n = 0; n < exact.size(); ++n) {
    double error = std::fabs(LoadElement(element, got.data(), static_cast<int64_t>(n)) - exact[n]);
    largest = std::fmax(largest, error);
    sum += error;
    magnitude += std::fabs(exact[n]);
  }
  std::printf("| %s | %s | %s | %s | %ld | %ld | %s | %s | %.2e | %.2e | %.4f %% |\n",
              options.engine.c_str(), options.element.c_str(),
              report.accumulate == AccumulateType::kFloat16 ? "float16" : "float32",
              options.values.c_str(), static_cast<long>(options.length),
              static_cast<long>(options.head_dim), options.causal ? "causal" : "full",
              tensor.c_str(), largest, sum / static_cast<double>(exact.size()),
              100 * sum / magnitude);
}

// Run: both directions of one problem on an engine, and the exact results.
class Run {
 public:
  explicit Run(const Options& options)
      : options_(options),
        backend_(MakeEngine(options.engine)),
        problem_(ProblemOf(options)),
        inputs_(RandomInputs(problem_, options.seed,
                             options.values == "uniform" ? Values::kUniform : Values::kNormal)),
        o_(OutputBytes()),
        lse_(problem_.LseElements() * int64_t{sizeof(float)}),
        reference_(problem_, {inputs_.q.data(), inputs_.k.data(), inputs_.v.data()}) {}

  absl::Status Forward() {
    AlignedBytes workspace(backend_->WorkspaceBytes(problem_, Direction::kForward));
    ForwardCall call;
    FillInputs(call);
    call.o = o_.data();
    call.lse = lse_.as<float>();
    call.workspace = workspace.data();
    absl::Status supported = backend_->Supports(problem_, Direction::kForward);
    if (!supported.ok()) return supported;
    absl::StatusOr<LaunchReport> report = backend_->Forward({&call, 1});
    if (!report.ok()) return report.status();
    ReferenceOutputs exact = reference_.Forward();
    PrintError(options_, *report, "O", problem_.element, o_, exact.o);
    PrintError(options_, *report, "lse", ElementType::kFloat32, lse_, exact.lse);
    return absl::OkStatus();
  }

  absl::Status Backward() {
    AlignedBytes workspace(backend_->WorkspaceBytes(problem_, Direction::kBackward));
    AlignedBytes d_q(OutputBytes()), d_k(OutputBytes()), d_v(OutputBytes());
    BackwardCall call;
    FillInputs(call);
    call.o = o_.data();
    call.lse = lse_.as<float>();
    call.d_o = inputs_.d_o.data();
    call.d_q = d_q.data();
    call.d_k = d_k.data();
    call.d_v = d_v.data();
    call.workspace = workspace.data();
    absl::Status supported = backend_->Supports(problem_, Direction::kBackward);
    if (!supported.ok()) return supported;
    absl::StatusOr<LaunchReport> report = backend_->Backward({&call, 1});
    if (!report.ok()) return report.status();
    ReferenceGradients exact = reference_.Backward(inputs_.d_o.data(), nullptr);
    PrintError(options_, *report, "dQ", problem_.element, d_q, exact.d_q);
    PrintError(options_, *report, "dK", problem_.element, d_k, exact.d_k);
    PrintError(options_, *report, "dV", problem_.element, d_v, exact.d_v);
    return absl::OkStatus();
  }

 private:
  // q, k, v, o and their gradients are all of this size here.
  int64_t OutputBytes() const { return problem_.OutputElements() * ElementBytes(problem_.element); }
  template <class Call>
  void FillInputs(Call& call) {
    call.problem = &problem_;
    call.q = inputs_.q.data();
    call.k = inputs_.k.data();
    call.v = inputs_.v.data();
  }

  Options options_;
  std::unique_ptr<Backend> backend_;
  Problem problem_;
  ProblemInputs inputs_;
  AlignedBytes o_, lse_;
  Reference reference_;
};

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("An engine's error against the float64 reference.");
  app.add_option("--engine", options.engine)
      ->check(CLI::IsMember({"reference", "cpu", "emulated_sm70"}));
  app.add_option("--element", options.element)
      ->check(CLI::IsMember({"float16", "bfloat16", "float32"}));
  app.add_option("--accumulate", options.accumulate)->check(CLI::IsMember({"float32", "float16"}));
  app.add_option("--values", options.values)->check(CLI::IsMember({"normal", "uniform"}));
  app.add_option("--length", options.length)->check(CLI::Range(1, 16384));
  app.add_option("--head_dim", options.head_dim)->check(CLI::Range(1, 256));
  app.add_option("--heads", options.heads)->check(CLI::Range(1, 64));
  app.add_option("--seed", options.seed);
  app.add_flag("--causal", options.causal);
  CLI11_PARSE(app, argc, argv);
  Run run(options);
  for (const absl::Status& status : {run.Forward(), run.Backward()}) {
    if (status.ok()) continue;
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
