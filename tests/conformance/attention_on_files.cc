// attention_on_files: one forward and backward of an engine on raw float16 tensors in a folder, so
// that a script can compare it with anything. Layout [1, heads, length, head_dim]; reads q, k, v,
// d_o; writes o, lse (float32), d_q, d_k, d_v; prints the kernels' names and seconds, and the most
// device memory that was in use beside the size of backward's inputs and outputs.
//
//     attention_on_files --folder F --heads 4 --length 4096 --head_dim 64 [--causal]
//         [--backend cuda] [--hbm_fraction 0.9] [--accumulate f16] [--atomic] [--repeat N]
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/registry/registry.h"

ABSL_FLAG(std::string, folder, ".", "where the tensors lie");
ABSL_FLAG(std::string, backend, "cuda", "engine");
ABSL_FLAG(double, hbm_fraction, 0.9, "of the GPU's free memory, taken at the start");
ABSL_FLAG(std::string, accumulate, "f32", "f32 or f16");
ABSL_FLAG(int, heads, 1, "query and KV heads");
ABSL_FLAG(int, length, 64, "queries and keys");
ABSL_FLAG(int, head_dim, 64, "of Q, K and V");
ABSL_FLAG(int, repeat, 1, "runs of each direction; the last one is reported");
ABSL_FLAG(bool, causal, false, "row i sees keys up to i");
ABSL_FLAG(bool, atomic, false, "let dQ be added in any order");

namespace attnd {
namespace {

struct Tensors {
  std::vector<uint16_t> q, k, v, o, d_o, d_q, d_k, d_v;
  std::vector<float> lse;
};

std::string PathOf(const std::string& name) {
  return absl::StrCat(absl::GetFlag(FLAGS_folder), "/", name);
}

absl::StatusOr<std::vector<uint16_t>> Read(const std::string& name, int64_t elements) {
  std::vector<uint16_t> data(elements);
  std::ifstream file(PathOf(name), std::ios::binary);
  file.read(reinterpret_cast<char*>(data.data()), elements * 2);
  if (file.gcount() == elements * 2) return data;
  return absl::InvalidArgumentError(
      absl::StrCat(PathOf(name), ": expected ", elements * 2, " bytes, got ", file.gcount()));
}

template <class T>
void Write(const std::string& name, const std::vector<T>& data) {
  std::ofstream(PathOf(name), std::ios::binary)
      .write(reinterpret_cast<const char*>(data.data()),
             static_cast<std::streamsize>(data.size() * sizeof(T)));
}

Problem ProblemFromFlags() {
  Problem p;
  p.batch = 1;
  p.q_heads = p.kv_heads = absl::GetFlag(FLAGS_heads);
  p.q_len = p.kv_len = absl::GetFlag(FLAGS_length);
  p.qk_head_dim = p.v_head_dim = absl::GetFlag(FLAGS_head_dim);
  p.element = ElementType::kFloat16;
  p.causal = absl::GetFlag(FLAGS_causal);
  p.alignment = Alignment::kTopLeft;
  p.allow_nondeterministic = absl::GetFlag(FLAGS_atomic);
  if (absl::GetFlag(FLAGS_accumulate) == "f16") p.accumulate = AccumulateType::kFloat16;
  return p;
}

absl::Status RunForward(Backend& backend, const Problem& p, Tensors& t) {
  RETURN_IF_ERROR(backend.Supports(p, Direction::kForward));
  ForwardCall call;
  call.problem = &p;
  call.q = t.q.data();
  call.k = t.k.data();
  call.v = t.v.data();
  call.o = t.o.data();
  call.lse = t.lse.data();
  std::vector<std::byte> workspace(backend.WorkspaceBytes(p, Direction::kForward));
  call.workspace = workspace.data();
  const ForwardCall calls[] = {call};
  ASSIGN_OR_RETURN(LaunchReport report, backend.Forward(calls));
  std::cout << report.kernel << " " << report.seconds << "\n";
  return absl::OkStatus();
}

absl::Status RunBackward(Backend& backend, const Problem& p, Tensors& t) {
  RETURN_IF_ERROR(backend.Supports(p, Direction::kBackward));
  BackwardCall call;
  call.problem = &p;
  call.q = t.q.data();
  call.k = t.k.data();
  call.v = t.v.data();
  call.o = t.o.data();
  call.lse = t.lse.data();
  call.d_o = t.d_o.data();
  call.d_q = t.d_q.data();
  call.d_k = t.d_k.data();
  call.d_v = t.d_v.data();
  std::vector<std::byte> workspace(backend.WorkspaceBytes(p, Direction::kBackward));
  call.workspace = workspace.data();
  const BackwardCall calls[] = {call};
  ASSIGN_OR_RETURN(LaunchReport report, backend.Backward(calls));
  std::cout << report.kernel << " " << report.seconds << "\n";
  return absl::OkStatus();
}

absl::Status Run() {
  const Problem p = ProblemFromFlags();
  RETURN_IF_ERROR(Validate(p));
  ASSIGN_OR_RETURN(auto backend,
                   MakeBackend(absl::GetFlag(FLAGS_backend),
                               {.memory_fraction = absl::GetFlag(FLAGS_hbm_fraction)}));
  Tensors t;
  ASSIGN_OR_RETURN(t.q, Read("q", p.QueryElements()));
  ASSIGN_OR_RETURN(t.k, Read("k", p.KeyElements()));
  ASSIGN_OR_RETURN(t.v, Read("v", p.ValueElements()));
  ASSIGN_OR_RETURN(t.d_o, Read("d_o", p.OutputElements()));
  for (auto* out : {&t.o, &t.d_q, &t.d_k, &t.d_v}) out->resize(p.OutputElements());
  t.lse.resize(p.LseElements());
  for (int n = 0; n < absl::GetFlag(FLAGS_repeat); ++n) {
    RETURN_IF_ERROR(RunForward(*backend, p, t));
    RETURN_IF_ERROR(RunBackward(*backend, p, t));
  }
  constexpr int kTensors = 8;  // q, k, v, o, d_o, d_q, d_k, d_v, all of one size
  const int64_t bytes = kTensors * 2 * p.OutputElements() + 4 * p.LseElements();
  std::cout << "peak " << backend->Use().memory_peak_bytes << " bytes, tensors " << bytes << "\n";
  Write("o", t.o);
  Write("lse", t.lse);
  Write("d_q", t.d_q);
  Write("d_k", t.d_k);
  Write("d_v", t.d_v);
  return absl::OkStatus();
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  absl::Status status = attnd::Run();
  if (status.ok()) return 0;
  std::cerr << status.message() << "\n";
  return 1;
}
