#include "client/demo/text.h"

#include <gtest/gtest.h>

namespace attnd::demo {
namespace {

TEST(CharacterText, NumbersItsCharactersInOrder) {
  CharacterText text("banana");
  EXPECT_EQ(text.vocabulary(), 3);
  EXPECT_EQ(text.Decode({0, 1, 2}), "abn");
}

TEST(CharacterText, TargetsAreTheNextCharacters) {
  CharacterText text("abcdefghij");
  std::mt19937_64 random(1);
  TextBatch batch = text.RandomBatch(20, 4, random);
  ASSERT_EQ(batch.input.size(), 80u);
  ASSERT_EQ(batch.target.size(), 80u);
  for (size_t i = 0; i < batch.input.size(); ++i) EXPECT_EQ(batch.target[i], batch.input[i] + 1);
}

TEST(CharacterText, SaysWhichFileIsMissing) {
  absl::Status status = CharacterText::FromFile("/no/such/file").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "cannot read /no/such/file: No such file or directory");
}

}  // namespace
}  // namespace attnd::demo
