// One forward and one backward of causal attention in C++, and a mask:
//
//     bazel build //examples:attention && bazel-bin/examples/attention 127.0.0.1:7070
//
// Equal keys make equal weights, so row i of O is the mean of the values 0 to i.
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/attention_client.h"
#include "client/masks/mask_builder.h"

int main(int argc, char** argv) {
  absl::StatusOr<std::unique_ptr<attnd::AttentionClient>> client =
      attnd::AttentionClient::Connect({.addresses = {argc > 1 ? argv[1] : "127.0.0.1:7070"}});
  if (!client.ok()) return std::puts(client.status().ToString().c_str()), 1;

  attnd::Problem problem;
  problem.batch = problem.q_heads = problem.kv_heads = 1;
  problem.q_len = problem.kv_len = 4;
  problem.qk_head_dim = problem.v_head_dim = 8;
  problem.element = attnd::ElementType::kFloat32;
  problem.causal = true;

  std::vector<float> q(4 * 8), k(4 * 8), v(4 * 8), o(4 * 8), lse(4), d_o(4 * 8, 1.0f);
  std::vector<float> d_q(4 * 8), d_k(4 * 8), d_v(4 * 8);
  for (int n = 0; n < 4 * 8; ++n) v[n] = static_cast<float>(n / 8);

  attnd::Residual kept;  // what the daemon keeps, so that backward sends d_o alone
  absl::StatusOr<attnd::CallReceipt> forward =
      (*client)->Forward(problem, {.q = q.data(), .k = k.data(), .v = v.data()},
                         {.o = o.data(), .lse = lse.data()}, {}, &kept);
  if (!forward.ok()) return std::puts(forward.status().ToString().c_str()), 1;
  absl::StatusOr<attnd::CallReceipt> backward =
      (*client)->Backward(problem,
                          {.q = q.data(),
                           .k = k.data(),
                           .v = v.data(),
                           .o = o.data(),
                           .lse = lse.data(),
                           .d_o = d_o.data()},
                          {.d_q = d_q.data(), .d_k = d_k.data(), .d_v = d_v.data()}, {}, &kept);
  if (!backward.ok()) return std::puts(backward.status().ToString().c_str()), 1;

  // A window of two keys, and the first key, which all rows see; causal holds as well.
  const attnd::masks::Mask mask = attnd::masks::Window(1, 0) | attnd::masks::Global({{0, 1}});
  absl::Status set = attnd::masks::SetMask(mask.Spec(), problem);
  if (!set.ok()) return std::puts(set.ToString().c_str()), 1;
  absl::StatusOr<attnd::MaskReport> report = (*client)->CompileMask(problem);
  if (!report.ok()) return std::puts(report.status().ToString().c_str()), 1;
  std::printf("the mask shows %d of 16 scores\n", static_cast<int>(report->visible));

  bool right = true;
  for (int i = 0; i < 4; ++i) {
    std::printf("row %d: O %.3f, expected %.3f; dV %.3f\n", i, o[i * 8], i / 2.0, d_v[i * 8]);
    right = right && std::abs(o[i * 8] - i / 2.0) < 1e-5;
  }
  return right ? 0 : 1;
}
