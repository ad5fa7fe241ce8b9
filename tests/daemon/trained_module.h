// A small module that a C++ client trains on a daemon, for tests that compare ways to send tensors.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "client/attention_client.h"
#include "client/modules/module_client.h"
#include "tests/daemon/module_caller.h"

namespace attnd {

inline std::vector<std::byte> BytesOf(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

inline SentPut SmallWeights() {
  Random random(3);
  SentPut put;
  for (const char* layer : {"layer0.", "layer1."}) {
    for (const char* name : {"weight", "bias"}) {
      SentTensor tensor;
      tensor.header.set_kind(v1::TENSOR_KIND_WEIGHT);
      tensor.header.set_name(absl::StrCat(layer, name));
      tensor.header.set_element(v1::ELEMENT_FLOAT32);
      const bool is_matrix = std::string(name) == "weight";
      tensor.header.add_shape(kModuleWidth);
      if (is_matrix) tensor.header.add_shape(kModuleWidth);
      tensor.bytes = std::make_shared<const std::string>(
          RandomBytes(random, kModuleWidth * (is_matrix ? kModuleWidth : 1)));
      put.tensors.push_back(std::move(tensor));
    }
  }
  put.commit.set_complete(true);
  return put;
}

// A module on a daemon, and the same micro-batch each time.
class TrainedModule {
 public:
  struct Options {
    std::string name = "m";
    uint32_t rows;
    int64_t shared_bytes = 0;
    int channels = 8;
  };
  TrainedModule(const std::string& address, const Options& options) : rows_(options.rows) {
    auto client = AttentionClient::Connect({.addresses = {address},
                                            .channels_per_address = options.channels,
                                            .wait_for_ready = true,
                                            .shared_memory_bytes = options.shared_bytes});
    CHECK(client.ok()) << client.status();
    client_ = *std::move(client);
    v1::RegisterModuleRequest request = SmallRegistration(options.name);
    request.mutable_limits()->set_max_rows(rows_);
    request.mutable_limits()->set_kept_rows(rows_);
    auto made = ModuleClient(*client_).Register(request);
    CHECK(made.ok()) << made.status();
    module_ = std::move(made->module);
    const absl::Status put = module_->Put(SmallWeights(), {});
    CHECK(put.ok()) << put;
  }

  // y and dx of one micro-batch.
  std::pair<std::vector<std::byte>, std::vector<std::byte>> Compute() {
    Random random(5);
    const std::vector<std::byte> x = BytesOf(RandomBytes(random, rows_ * kModuleWidth));
    const std::vector<std::byte> dy = BytesOf(RandomBytes(random, rows_ * kModuleWidth));
    std::vector<std::byte> y(x.size()), dx(x.size());
    v1::ModuleForwardHeader header;
    header.mutable_rows()->set_batch(1);
    header.mutable_rows()->set_length(rows_);
    header.set_training(true);
    std::unique_ptr<RemoteModule::Activations> kept;
    absl::Status done = module_->Forward(header, {.x = x}, absl::MakeSpan(y), {}, &kept);
    EXPECT_TRUE(done.ok()) << done;
    done = module_->Backward(*kept, dy, false, {.dx = absl::MakeSpan(dx)}, {});
    EXPECT_TRUE(done.ok()) << done;
    return {std::move(y), std::move(dx)};
  }
  void Step() {
    v1::StepRequest request;
    request.add_group()->set_learning_rate(0.1);
    const auto done = module_->Step(std::move(request), {});
    EXPECT_TRUE(done.ok()) << done.status();
  }

 private:
  const uint32_t rows_;
  std::unique_ptr<AttentionClient> client_;
  std::unique_ptr<RemoteModule> module_;
};

}  // namespace attnd
