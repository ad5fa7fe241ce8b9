// attnd_local: its results, and what it refuses. tests/python/test_local.py compares those of all
// options with a daemon's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/c/attnd_client.h"

namespace {

struct FreeLocal {
  void operator()(attnd_local* local) const { attnd_local_free(local); }
};
struct FreeLocalCall {
  void operator()(attnd_call* call) const { attnd_call_free(call); }
};

// Two queries and two keys of one head: the first key is as good as the second to the first query,
// and hidden from it where the problem is causal.
struct TwoRows {
  TwoRows() {
    problem.struct_size = sizeof(problem);
    problem.batch = problem.q_heads = problem.kv_heads = 1;
    problem.q_len = problem.kv_len = problem.qk_head_dim = problem.v_head_dim = 2;
    problem.element = ATTND_FLOAT32;
    problem.layout = ATTND_BHLD;
    forward.struct_size = sizeof(forward);
    forward.q = forward.k = q.data();
    forward.v = v.data();
    forward.o = o.data();
    backward.struct_size = sizeof(backward);
    backward.q = backward.k = q.data();
    backward.v = v.data();
    backward.o = o.data();
    backward.lse = lse.data();
    backward.d_o = d_o.data();
    backward.d_q = d_q.data();
    backward.d_k = d_k.data();
    backward.d_v = d_v.data();
  }
  static constexpr float kUnset = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> q = {0, 0, 0, 0}, v = {1, 2, 3, 6}, d_o = {1, 0, 0, 1};
  std::vector<float> o = {kUnset, kUnset, kUnset, kUnset}, lse = {kUnset, kUnset};
  std::vector<float> d_q = o, d_k = o, d_v = o;
  attnd_problem problem = {};
  attnd_forward_tensors forward = {};
  attnd_backward_tensors backward = {};
};

class LocalEngine : public ::testing::TestWithParam<int32_t> {  // whether it is that of float64
 protected:
  std::unique_ptr<attnd_local, FreeLocal> local_{attnd_local_new(1, GetParam())};
  std::unique_ptr<attnd_call, FreeLocalCall> call_{
      attnd_call_new(nullptr, 5, ATTND_PRIORITY_DEFAULT)};
};

TEST_P(LocalEngine, ComputesForwardAndBackward) {
  TwoRows rows;
  rows.forward.lse = rows.lse.data();
  ASSERT_EQ(attnd_local_forward(local_.get(), &rows.problem, &rows.forward, call_.get()), ATTND_OK)
      << attnd_call_message(call_.get());
  EXPECT_EQ(rows.o, (std::vector<float>{2, 4, 2, 4}));
  EXPECT_NEAR(rows.lse[0], std::log(2.0), 1e-6);
  const std::string receipt = attnd_call_result_json(call_.get());
  EXPECT_NE(receipt.find("\"backend\":\"local\""), std::string::npos) << receipt;
  ASSERT_EQ(attnd_local_backward(local_.get(), &rows.problem, &rows.backward, call_.get()),
            ATTND_OK);
  EXPECT_EQ(rows.d_v, (std::vector<float>{0.5, 0.5, 0.5, 0.5}));
  EXPECT_EQ(rows.d_q, (std::vector<float>{0, 0, 0, 0}));
}

TEST_P(LocalEngine, TakesOptionsAndNeedsNoLse) {
  TwoRows rows;
  rows.problem.causal = 1;
  rows.problem.alignment = ATTND_TOP_LEFT;
  ASSERT_EQ(attnd_local_forward(local_.get(), &rows.problem, &rows.forward, call_.get()), ATTND_OK);
  EXPECT_EQ(rows.o, (std::vector<float>{1, 2, 2, 4}));
}

TEST_P(LocalEngine, NamesWhatItRefuses) {
  TwoRows rows;
  rows.problem.q_len = 0;
  EXPECT_EQ(attnd_local_forward(local_.get(), &rows.problem, &rows.forward, call_.get()), 3);
  EXPECT_NE(std::string(attnd_call_message(call_.get())).find("q_len"), std::string::npos);
  rows.problem.q_len = 2;
  rows.forward.v = nullptr;
  EXPECT_EQ(attnd_local_forward(local_.get(), &rows.problem, &rows.forward, call_.get()), 3);
  EXPECT_STREQ(attnd_call_message(call_.get()), "v: expected a tensor, got a null pointer");
  rows.forward.v = rows.v.data();
  attnd_residual* kept = nullptr;
  rows.forward.keep = &kept;
  EXPECT_EQ(attnd_local_forward(local_.get(), &rows.problem, &rows.forward, call_.get()), 3);
  rows.forward.keep = nullptr;
  rows.forward.struct_size = 0;
  EXPECT_EQ(attnd_local_forward(local_.get(), &rows.problem, &rows.forward, call_.get()), 3);
}

TEST_P(LocalEngine, ACancelledCallEndsSo) {
  TwoRows rows;
  attnd_call_cancel(call_.get());
  EXPECT_EQ(attnd_local_backward(local_.get(), &rows.problem, &rows.backward, call_.get()), 1);
  EXPECT_EQ(std::string(attnd_call_result_json(call_.get())), "{}");
}

TEST_P(LocalEngine, AHookIsAskedOnTheCallersThread) {
  // In float64 this takes long after the hook's first 50 ms, so that it ends by what the hook says.
  const int64_t length = 4096;
  std::vector<float> q(length * 2), o(length * 2);
  TwoRows rows;
  rows.problem.q_len = rows.problem.kv_len = length;
  rows.forward.q = rows.forward.k = rows.forward.v = q.data();
  rows.forward.o = o.data();
  std::thread::id asked;
  const auto hook = [](void* asked) {
    *static_cast<std::thread::id*>(asked) = std::this_thread::get_id();
    return 1;
  };
  attnd_call_set_poll_hook(call_.get(), hook, &asked);
  const int code = attnd_local_forward(local_.get(), &rows.problem, &rows.forward, call_.get());
  if (GetParam() == 0 && code == ATTND_OK) return;  // it ended within 50 ms
  EXPECT_EQ(code, 1);
  EXPECT_EQ(asked, std::this_thread::get_id());
}

INSTANTIATE_TEST_SUITE_P(Computes, LocalEngine, ::testing::Values(0, 1));

}  // namespace
