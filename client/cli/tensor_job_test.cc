#include "client/cli/tensor_job.h"

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "attention/random_problem.h"
#include "attention/reference.h"
#include "attention/tensor_view.h"
#include "client/cli/numeric_check.h"
#include "tests/fixtures/fake_server.h"

namespace attnd {
namespace {

absl::Span<const std::byte> BytesOf(const AlignedBytes& tensor) {
  return absl::MakeConstSpan(tensor.data(), static_cast<size_t>(tensor.size()));
}

Problem GroupedProblem() {
  Problem p;
  p.batch = 2;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = 5;
  p.kv_len = 7;
  p.qk_head_dim = 8;
  p.v_head_dim = 6;
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  p.bias = Bias{ElementType::kFloat32, {1, 4, 5, 7}, true};
  p.bool_mask = BoolMask{{2, 1, 1, 7}};
  return p;
}

// A file with everything, and the numbers it holds.
struct Fixture {
  Fixture() : p(GroupedProblem()), in(RandomInputs(p, 3)), mask(2 * 7) {
    for (int64_t n = 0; n < 14; ++n) {
      mask.data()[n] = static_cast<std::byte>(
          MaskBit(*p.bool_mask, in.mask_bits.as<uint8_t>(), n / 7, 0, 0, n % 7));
    }
    tensors["q"] = {"F32", {2, 4, 5, 8}, BytesOf(in.q)};
    tensors["k"] = {"F32", {2, 2, 7, 8}, BytesOf(in.k)};
    tensors["v"] = {"F32", {2, 2, 7, 6}, BytesOf(in.v)};
    tensors["bias"] = {"F32", {1, 4, 5, 7}, BytesOf(in.bias)};
    tensors["mask"] = {"BOOL", {2, 1, 1, 7}, BytesOf(mask)};
  }
  absl::StatusOr<SafetensorsFile> File() const {
    return SafetensorsFile::Parse(SerializeSafetensors(tensors, metadata));
  }
  // The error of a job on the file.
  std::string Error() const {
    absl::StatusOr<SafetensorsFile> file = File();
    EXPECT_TRUE(file.ok()) << file.status();
    return std::string(TensorJob::Make(*file, {}).status().message());
  }
  Problem p;
  ProblemInputs in;
  AlignedBytes mask;
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata = {{"causal", "bottom_right"}};
};

void ExpectNear(const StoredTensor& got, const std::vector<double>& exact) {
  ASSERT_EQ(got.elements(), static_cast<int64_t>(exact.size()));
  for (size_t n = 0; n < exact.size(); ++n) {
    float value = LoadElement(ElementType::kFloat32, got.data.data(), static_cast<int64_t>(n));
    if (value != exact[n]) {
      EXPECT_NEAR(value, exact[n], 1e-5) << n;
    }
  }
}

TEST(TensorJob, ComputesForwardAndBackwardOfAFile) {
  FakeServer server("127.0.0.1:0");
  auto client = *AttentionClient::Connect({.addresses = {server.address()}});
  Fixture f;
  f.tensors["dout"] = {"F32", {2, 4, 5, 6}, BytesOf(f.in.d_o)};
  f.tensors["dlse"] = {"F32", {2, 4, 5}, BytesOf(f.in.d_lse)};
  absl::StatusOr<SafetensorsFile> file = f.File();
  absl::StatusOr<TensorJob> job = TensorJob::Make(*file, {});
  ASSERT_TRUE(job.ok()) << job.status();
  ASSERT_EQ(job->Run(*client, {}), absl::OkStatus());
  auto results = job->Results();
  Reference reference(f.p, {f.in.q.data(), f.in.k.data(), f.in.v.data(),
                            f.in.mask_bits.as<uint8_t>(), f.in.bias.data()});
  ReferenceOutputs exact = reference.Forward();
  ReferenceGradients gradients = reference.Backward(f.in.d_o.data(), f.in.d_lse.as<float>());
  EXPECT_EQ(results["o"].shape, (std::vector<int64_t>{2, 4, 5, 6}));
  ExpectNear(results["o"], exact.o);
  ExpectNear(results["lse"], exact.lse);
  ExpectNear(results["dq"], gradients.d_q);
  ExpectNear(results["dk"], gradients.d_k);
  ExpectNear(results["dv"], gradients.d_v);
  ExpectNear(results["dbias"], gradients.d_bias);
}

TEST(TensorJob, NamesTheTensorThatIsWrong) {
  Fixture good;
  EXPECT_EQ(good.Error(), "");
  Fixture f;
  f.tensors.erase("k");
  EXPECT_EQ(f.Error(), "k: expected a tensor in the file, got none");
  f = Fixture();
  f.tensors["v"].shape = {2, 2, 6, 7};
  EXPECT_EQ(f.Error(), "v: expected [2,2,7,7], got [2,2,6,7]");
  f = Fixture();
  f.tensors["q"].shape = {8, 5, 8};
  EXPECT_EQ(f.Error(), "q: expected 4 dimensions in this layout, got [8,5,8]");
  f = Fixture();
  f.tensors["v"] = {"F16", {2, 2, 7, 12}, BytesOf(f.in.v)};
  EXPECT_EQ(f.Error(), "v: expected F32, got F16");
  f = Fixture();
  f.tensors["bias"].shape = {4, 5, 7};
  EXPECT_EQ(f.Error(), "bias: expected four dimensions, got [4,5,7]");
  f = Fixture();
  f.tensors["mask"].shape = {1, 2, 1, 7};
  EXPECT_EQ(f.Error(), "problem.bool_mask.shape[1]: expected 1 or 4, got 2");
  f = Fixture();
  f.metadata = {{"causal", "bottom_right"}, {"layout", "packed_thd"}};
  EXPECT_EQ(f.Error(), "q: expected 3 dimensions in this layout, got [2,4,5,8]");
  f = Fixture();
  f.tensors["kv_lengths"] = {"F32", {2}, BytesOf(f.in.q).subspan(0, 8)};
  EXPECT_EQ(f.Error(), "kv_lengths: expected I32 or I64, got F32");
  f = Fixture();
  const int32_t offset = 3;
  f.tensors["offsets"] = {
      "I32", {1}, {reinterpret_cast<const std::byte*>(&offset), sizeof(offset)}};
  f.metadata = {{"causal", "true"}};
  EXPECT_EQ(f.Error(), "");
  f.tensors.erase("offsets");
  EXPECT_TRUE(absl::StartsWith(f.Error(), "problem.alignment: expected top_left, bottom_right or "))
      << f.Error();
  f.tensors["offsets"] = {
      "I32", {1}, {reinterpret_cast<const std::byte*>(&offset), sizeof(offset)}};
  f.metadata = {{"align", "bottom_right"}};
  EXPECT_EQ(f.Error(),
            "align: expected the alignment that is given already, by align or the tensor offsets, "
            "got bottom_right");
  f = Fixture();
  f.tensors["biass"] = f.tensors["bias"];
  EXPECT_TRUE(absl::StartsWith(f.Error(), "biass: expected a name of q, k, v, bias, "))
      << f.Error();
  f = Fixture();
  f.tensors["dlse"] = {"F32", {2, 4, 5}, BytesOf(f.in.d_lse)};
  EXPECT_EQ(f.Error(), "dlse: expected dout beside it, got none");
  f = Fixture();
  f.metadata["denominator"] = "zero_rest";
  f.tensors["sink_logits"] = {"F32", {4}, BytesOf(f.in.q).subspan(0, 16)};
  EXPECT_EQ(f.Error(), "sink_logits: expected none with the denominator zero_rest, got some");
  f = Fixture();
  f.metadata = {{"cuasal", "1"}};
  EXPECT_EQ(f.Error(),
            "cuasal: expected the name of a problem flag in the file's metadata, got cuasal");
}

TEST(CheckCase, AcceptsExactAttentionAndFindsOneWrongNumber) {
  FakeServer server("127.0.0.1:0");
  auto client = *AttentionClient::Connect({.addresses = {server.address()}});
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Problem p = RandomProblem(seed, {.max_pairs = 500, .max_head_dim = 32});
    CheckedCase c = CheckCase(*client, p, seed);
    EXPECT_EQ(c.forward.status, absl::OkStatus());
    EXPECT_LE(c.forward.error_in_bounds, 1) << "seed " << seed;
    EXPECT_LE(c.backward.error_in_bounds, 1) << "seed " << seed;
  }
  server.CorruptReplies();
  CheckedCase c = CheckCase(*client, GroupedProblem(), 1);
  EXPECT_GT(c.forward.error_in_bounds, 1);
  EXPECT_EQ(c.forward.worst_tensor, "o");
  EXPECT_GT(c.backward.error_in_bounds, 1);
  server.SetScript([](int, grpc::ServerContext&) {
    return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no");
  });
  EXPECT_TRUE(CheckCase(*client, GroupedProblem(), 1).backward.unsupported);
}

}  // namespace
}  // namespace attnd
