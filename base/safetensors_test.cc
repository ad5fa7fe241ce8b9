#include "base/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

std::string FileOf(const std::string& header, size_t data_bytes) {
  uint64_t length = header.size();
  std::string bytes(reinterpret_cast<const char*>(&length), 8);
  return bytes + header + std::string(data_bytes, 'x');
}

std::string ErrorOf(const std::string& bytes) {
  return std::string(SafetensorsFile::Parse(bytes).status().message());
}

TEST(Safetensors, ReadsBackWhatItWrote) {
  std::vector<float> floats = {1, 2, 3, 4, 5, 6};
  std::vector<uint8_t> bools = {1, 0, 1};
  std::map<std::string, StoredTensor> tensors;
  tensors["b"] = {"BOOL", {3}, absl::MakeConstSpan(reinterpret_cast<std::byte*>(bools.data()), 3)};
  tensors["a"] = {
      "F32", {2, 3}, absl::MakeConstSpan(reinterpret_cast<std::byte*>(floats.data()), 24)};
  tensors["empty"] = {"F16", {0, 5}, {}};
  std::string bytes = SerializeSafetensors(tensors, {{"causal", "top_left"}});
  uint64_t header;
  std::memcpy(&header, bytes.data(), 8);
  EXPECT_EQ(header % 8, 0u);
  absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata().at("causal"), "top_left");
  ASSERT_EQ(file->tensors().size(), 3u);
  EXPECT_EQ(file->Find("a")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(file->Find("a")->data.data(), floats.data(), 24), 0);
  EXPECT_EQ(file->Find("b")->dtype, "BOOL");
  EXPECT_EQ(file->Find("c"), nullptr);
}

TEST(Safetensors, NamesWhatIsWrong) {
  EXPECT_EQ(ErrorOf("short"), "safetensors: shorter than its header's length");
  EXPECT_EQ(ErrorOf(std::string(8, '\xff')),
            "safetensors: header of 18446744073709551615 bytes in a file of 8");
  EXPECT_EQ(ErrorOf(FileOf("{}", 0).substr(0, 9)), "safetensors: header of 2 bytes in a file of 9");
  EXPECT_EQ(ErrorOf(FileOf("[]", 0)), "safetensors: the header is no JSON object");
  EXPECT_EQ(ErrorOf(FileOf("{\"a\":", 0)), "safetensors: the header is no JSON object");
  auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return ErrorOf(FileOf(absl::StrCat("{\"q\":{\"dtype\":", dtype, ",\"shape\":", shape,
                                       ",\"data_offsets\":", offsets, "}}"),
                          16));
  };
  EXPECT_EQ(tensor("\"F32\"", "[4]", "[0,16]"), "");
  EXPECT_EQ(tensor("\"F33\"", "[4]", "[0,16]"), "safetensors: q: unknown dtype F33");
  EXPECT_EQ(tensor("7", "[4]", "[0,16]"), "safetensors: q: expected dtype, shape and data_offsets");
  EXPECT_EQ(tensor("\"F32\"", "[5]", "[0,16]"),
            "safetensors: q: expected 20 bytes by its shape, got 16");
  EXPECT_EQ(tensor("\"F32\"", "[4]", "[0,17]"),
            "safetensors: q.data_offsets: expected two numbers within 0..16");
  EXPECT_EQ(tensor("\"F32\"", "[4]", "[8,0]"),
            "safetensors: q.data_offsets: expected two numbers within 0..16");
  EXPECT_EQ(tensor("\"F32\"", "[4]", "[0]"),
            "safetensors: q.data_offsets: expected two numbers within 0..16");
  EXPECT_EQ(tensor("\"F32\"", "[-1]", "[0,16]"),
            "safetensors: q.shape: expected integers from 0, got -1");
  EXPECT_EQ(tensor("\"F32\"", "[1.5]", "[0,16]"),
            "safetensors: q.shape: expected integers from 0, got 1.5");
  EXPECT_EQ(tensor("\"F32\"", "[4294967296,4294967296]", "[0,16]"),
            "safetensors: q: its shape overflows");
  EXPECT_EQ(tensor("\"F32\"", "4", "[0,16]"), "safetensors: q.shape: expected a list of integers");
}

TEST(Safetensors, RefusesTensorsThatOverlapOrStandTwice) {
  std::string a = "\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}";
  std::string b = "\"b\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[7,15]}";
  EXPECT_EQ(ErrorOf(FileOf("{" + a + "," + b + "}", 16)), "safetensors: b overlaps a");
  EXPECT_EQ(ErrorOf(FileOf("{" + a + "," + a + "}", 16)), "safetensors: a stands twice");
  EXPECT_EQ(ErrorOf(FileOf("{\"__metadata__\":{\"a\":1}}", 0)),
            "safetensors: __metadata__.a: expected a string");
}

TEST(Safetensors, SurvivesRandomBytes) {
  std::vector<float> floats(6);
  std::map<std::string, StoredTensor> tensors;
  tensors["a"] = {
      "F32", {2, 3}, absl::MakeConstSpan(reinterpret_cast<std::byte*>(floats.data()), 24)};
  std::string good = SerializeSafetensors(tensors, {{"k", "v"}});
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 random(seed);
    std::string bytes = good.substr(0, random() % (good.size() + 1));
    for (int n = 0; n < 3 && !bytes.empty(); ++n) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    auto file = SafetensorsFile::Parse(bytes);
    if (!file.ok()) continue;
    for (const auto& [name, tensor] : file->tensors()) {
      EXPECT_LE(tensor.data.size(), bytes.size()) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace attnd
