// The C interface without a server: what it refuses, how errors come back, and structures of
// callers that were compiled against an older header.
#include "client/c/attnd_client.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

struct FreeCall {
  void operator()(attnd_call* call) const { attnd_call_free(call); }
};
struct FreeClient {
  void operator()(attnd_client* client) const { attnd_client_free(client); }
};
using CallPointer = std::unique_ptr<attnd_call, FreeCall>;
using ClientPointer = std::unique_ptr<attnd_client, FreeClient>;

CallPointer NewCall(double timeout_seconds = 5) {
  return CallPointer(attnd_call_new(nullptr, timeout_seconds, ATTND_PRIORITY_DEFAULT));
}

// Port 1 of loopback: nobody listens there.
attnd_client_options Nowhere() {
  static const char* const kAddresses[] = {"127.0.0.1:1"};
  attnd_client_options options = {};
  options.struct_size = sizeof(options);
  options.addresses = kAddresses;
  options.address_count = 1;
  options.max_attempts = 1;
  return options;
}

attnd_problem SmallProblem() {
  attnd_problem problem = {};
  problem.struct_size = sizeof(problem);
  problem.batch = problem.q_heads = problem.kv_heads = 1;
  problem.q_len = problem.kv_len = 2;
  problem.qk_head_dim = problem.v_head_dim = 4;
  problem.element = ATTND_FLOAT32;
  problem.layout = ATTND_BHLD;
  return problem;
}

struct Small {
  std::vector<float> q = std::vector<float>(8), k = q, v = q, o = q, lse = std::vector<float>(2);
  attnd_forward_tensors Forward() {
    attnd_forward_tensors tensors = {};
    tensors.struct_size = sizeof(tensors);
    tensors.q = q.data();
    tensors.k = k.data();
    tensors.v = v.data();
    tensors.o = o.data();
    tensors.lse = lse.data();
    return tensors;
  }
};

TEST(CInterface, SaysItsVersion) {
  EXPECT_EQ(attnd_abi_version(), ATTND_ABI_VERSION);
  EXPECT_EQ(std::string(attnd_version()).substr(0, 2), "0.");
}

// MaskSpec{version: 1, pattern: [{expr: {window: {left: -1, right: 0}}}], pattern_of: [0]}.
const std::string kCausal("\x08\x01\x22\x06\x0A\x04\x12\x02\x08\x01\x2A\x01\x00", 13);

TEST(CInterface, MasksHaveIds) {
  CallPointer call = NewCall();
  attnd_mask* masks[2];
  for (attnd_mask*& mask : masks) {
    mask = attnd_mask_new(kCausal.data(), kCausal.size(), 1, 1, 2, 2, call.get());
    ASSERT_NE(mask, nullptr) << attnd_call_message(call.get());
  }
  EXPECT_EQ(std::memcmp(attnd_mask_id(masks[0]), attnd_mask_id(masks[1]), 32), 0);
  for (attnd_mask* mask : masks) attnd_mask_free(mask);
  attnd_mask_free(nullptr);
}

TEST(CInterface, SaysWhatIsWrongWithAMask) {
  CallPointer call = NewCall();
  std::string negative = kCausal;
  negative[9] = 3;  // left −2
  EXPECT_EQ(attnd_mask_new(negative.data(), 13, 1, 1, 2, 2, call.get()), nullptr);
  EXPECT_EQ(attnd_call_code(call.get()), 3);
  EXPECT_STREQ(attnd_call_message(call.get()),
               "problem.mask.pattern[0].expr.window.left: expected -1 or above, got -2");
  EXPECT_EQ(attnd_mask_new("\xff", 1, 1, 1, 2, 2, call.get()), nullptr);
  EXPECT_EQ(attnd_call_code(call.get()), 3);
  EXPECT_EQ(attnd_mask_new(kCausal.data(), 0, 1, 1, 2, 2, call.get()), nullptr);
  EXPECT_EQ(attnd_mask_new(kCausal.data(), 13, 1, 1, 2, 0, call.get()), nullptr);
  EXPECT_STREQ(attnd_call_message(call.get()), "keys: expected 1..1048576, got 0");
}

TEST(CInterface, RefusesAMaskThatDoesNotFitTheProblem) {
  CallPointer call = NewCall();
  attnd_client_options options = Nowhere();
  ClientPointer client(attnd_client_new(&options, call.get()));
  ASSERT_NE(client, nullptr) << attnd_call_message(call.get());
  attnd_mask* mask = attnd_mask_new(kCausal.data(), kCausal.size(), 1, 1, 1, 1, call.get());
  ASSERT_NE(mask, nullptr) << attnd_call_message(call.get());
  Small small;
  attnd_forward_tensors tensors = small.Forward();
  attnd_problem problem = SmallProblem();
  problem.mask = mask;
  EXPECT_EQ(attnd_forward(client.get(), &problem, &tensors, call.get()), 3);
  EXPECT_NE(std::string(attnd_call_message(call.get())).find("problem.mask.extents"),
            std::string::npos)
      << attnd_call_message(call.get());
  attnd_mask_free(mask);
}

TEST(CInterface, RefusesToCompileNoMask) {
  CallPointer call = NewCall();
  attnd_client_options options = Nowhere();
  ClientPointer client(attnd_client_new(&options, call.get()));
  attnd_problem problem = SmallProblem();
  EXPECT_EQ(attnd_compile_mask(client.get(), 0, &problem, call.get()), 3);
  EXPECT_STREQ(attnd_call_message(call.get()), "problem.mask: expected a mask, got none");
  attnd_mask* mask = attnd_mask_new(kCausal.data(), kCausal.size(), 1, 1, 2, 2, call.get());
  ASSERT_NE(mask, nullptr) << attnd_call_message(call.get());
  problem.mask = mask;
  EXPECT_EQ(attnd_compile_mask(client.get(), 1, &problem, call.get()), 3);   // there is one address
  EXPECT_EQ(attnd_compile_mask(client.get(), 0, &problem, call.get()), 14);  // nobody listens
  EXPECT_STREQ(attnd_call_result_json(call.get()), "{}");
  problem.struct_size = 0;
  EXPECT_EQ(attnd_compile_mask(client.get(), 0, &problem, call.get()), 3);
  attnd_mask_free(mask);
}

TEST(CInterface, RefusesAProblemBeforeAByteIsSent) {
  CallPointer call = NewCall();
  attnd_client_options options = Nowhere();
  ClientPointer client(attnd_client_new(&options, call.get()));
  ASSERT_NE(client, nullptr) << attnd_call_message(call.get());
  Small small;
  attnd_forward_tensors tensors = small.Forward();
  attnd_problem problem = SmallProblem();
  problem.softcap = -1;
  EXPECT_EQ(attnd_forward(client.get(), &problem, &tensors, call.get()), 3);
  EXPECT_NE(std::string(attnd_call_message(call.get())).find("softcap"), std::string::npos);
  EXPECT_STREQ(attnd_call_result_json(call.get()), "{}");
}

TEST(CInterface, IsUnavailableWhenNobodyListens) {
  CallPointer call = NewCall();
  attnd_client_options options = Nowhere();
  ClientPointer client(attnd_client_new(&options, call.get()));
  Small small;
  attnd_forward_tensors tensors = small.Forward();
  attnd_problem problem = SmallProblem();
  EXPECT_EQ(attnd_forward(client.get(), &problem, &tensors, call.get()), 14);
  int32_t health = 7;
  EXPECT_EQ(attnd_check_health(client.get(), 0, &health, call.get()), 14);
  EXPECT_EQ(health, 7);
}

TEST(CInterface, GivesNoClientWhenAnOptionIsWrong) {
  CallPointer call = NewCall();
  attnd_client_options options = Nowhere();
  options.channels_per_address = 1000;
  EXPECT_EQ(attnd_client_new(&options, call.get()), nullptr);
  EXPECT_NE(std::string(attnd_call_message(call.get())).find("channels"), std::string::npos);
}

// Counts down, and cancels at zero.
int CountDown(void* argument) { return --*static_cast<int*>(argument) == 0; }

TEST(CInterface, CancelsWhenThePollHookSaysSo) {
  CallPointer call = NewCall(60);
  attnd_client_options options = Nowhere();
  options.wait_for_ready = 1;
  ClientPointer client(attnd_client_new(&options, call.get()));
  Small small;
  attnd_forward_tensors tensors = small.Forward();
  attnd_problem problem = SmallProblem();
  int polls_left = 3;
  attnd_call_set_poll_hook(call.get(), CountDown, &polls_left);
  EXPECT_EQ(attnd_forward(client.get(), &problem, &tensors, call.get()), 1);
  EXPECT_EQ(polls_left, 0);
}

TEST(CInterface, CancelsASmallCallAsWell) {
  CallPointer call = NewCall(60);
  attnd_client_options options = Nowhere();
  options.wait_for_ready = 1;
  ClientPointer client(attnd_client_new(&options, call.get()));
  int polls_left = 2;
  attnd_call_set_poll_hook(call.get(), CountDown, &polls_left);
  EXPECT_EQ(attnd_server_info(client.get(), 0, call.get()), 1);
}

TEST(CInterface, EndsACallThatAnotherThreadCancels) {
  CallPointer call = NewCall(60);
  attnd_client_options options = Nowhere();
  options.wait_for_ready = 1;
  ClientPointer client(attnd_client_new(&options, call.get()));
  Small small;
  attnd_forward_tensors tensors = small.Forward();
  attnd_problem problem = SmallProblem();
  std::thread other([&call] { attnd_call_cancel(call.get()); });
  EXPECT_EQ(attnd_forward(client.get(), &problem, &tensors, call.get()), 1);
  other.join();
}

TEST(CInterface, TellsOfAStructureWithoutItsSize) {
  CallPointer call = NewCall();
  attnd_client_options options = Nowhere();
  ClientPointer client(attnd_client_new(&options, call.get()));
  options.struct_size = 0;
  EXPECT_EQ(attnd_client_new(&options, call.get()), nullptr);
  EXPECT_STREQ(attnd_call_message(call.get()),
               "options.struct_size: expected sizeof of the structure, got 0");
  Small arrays;
  attnd_problem problem = SmallProblem();
  attnd_forward_tensors tensors = arrays.Forward();
  tensors.struct_size = 0;
  EXPECT_EQ(attnd_forward(client.get(), &problem, &tensors, call.get()), 3);
  EXPECT_STREQ(attnd_call_message(call.get()),
               "tensors.struct_size: expected sizeof of the structure, got 0");
  attnd_backward_tensors gradients = {};
  problem.struct_size = 7;
  EXPECT_EQ(attnd_backward(client.get(), &problem, &gradients, call.get()), 3);
  EXPECT_STREQ(attnd_call_message(call.get()),
               "problem.struct_size: expected sizeof of the structure, got 7");
}

TEST(CInterface, TakesWhatAnOlderCallerLacksAsZero) {
  CallPointer call = NewCall();
  attnd_client_options options = Nowhere();
  options.max_reply_bytes = -1;  // refused when read
  EXPECT_EQ(attnd_client_new(&options, call.get()), nullptr);
  options.struct_size = offsetof(attnd_client_options, max_reply_bytes);
  ClientPointer client(attnd_client_new(&options, call.get()));
  EXPECT_NE(client, nullptr) << attnd_call_message(call.get());
}

// A RegisterModuleRequest that names the module "m" and nothing else.
constexpr char kNameAlone[] = "\x0a\x01m";

TEST(CInterface, RefusesBytesThatAreNoRegistration) {
  CallPointer call = NewCall();
  attnd_client_options options = Nowhere();
  ClientPointer client(attnd_client_new(&options, call.get()));
  EXPECT_EQ(attnd_module_register(client.get(), "\xff", 1, -1, call.get()), nullptr);
  EXPECT_EQ(attnd_call_code(call.get()), 3);
  EXPECT_EQ(std::string(attnd_call_message(call.get())).rfind("request: expected", 0), 0);
}

TEST(CInterface, SaysThatNoServerRegistersModules) {
  CallPointer call = NewCall();
  attnd_client_options options = Nowhere();
  ClientPointer client(attnd_client_new(&options, call.get()));
  EXPECT_EQ(attnd_module_register(client.get(), kNameAlone, 3, -1, call.get()), nullptr);
  EXPECT_EQ(attnd_call_code(call.get()), 14);
  EXPECT_EQ(attnd_module_list(client.get(), call.get()), 14);
}

TEST(CInterface, FreesNoModuleAndNoActivations) {
  attnd_module_free(nullptr);
  attnd_activations_free(nullptr);
}

TEST(Digest, ChangesWithAnyBitAndWithTheSize) {
  std::vector<unsigned char> bytes(200, 0);
  std::set<uint64_t> seen;
  for (int64_t size : {0, 1, 63, 64, 65, 128, 200}) seen.insert(attnd_digest(bytes.data(), size));
  for (unsigned char& byte : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      byte = static_cast<unsigned char>(1 << bit);
      seen.insert(attnd_digest(bytes.data(), 200));
    }
    byte = 0;
  }
  EXPECT_EQ(seen.size(), 7 + 1600);
  EXPECT_EQ(attnd_digest(bytes.data(), 200), attnd_digest(std::vector<char>(200, 0).data(), 200));
}

}  // namespace
