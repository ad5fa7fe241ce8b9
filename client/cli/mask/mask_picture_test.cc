#include "client/cli/mask/mask_picture.h"

#include <gtest/gtest.h>
#include <png.h>

#include <fstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "client/masks/mask_builder.h"

namespace attnd {
namespace {

Problem WithMask(const masks::Mask& mask, int64_t rows, int64_t keys) {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = rows;
  p.kv_len = keys;
  p.qk_head_dim = p.v_head_dim = 16;
  p.alignment = Alignment::kTopLeft;
  const absl::Status status = masks::SetMask(mask.Spec(), p);
  CHECK(status.ok()) << status;
  return p;
}

MaskPicture Draw(const Problem& p, int64_t rows, int64_t columns) {
  absl::StatusOr<MaskPicture> picture = MaskPicture::Draw(p, rows, columns);
  CHECK(picture.ok()) << picture.status();
  return *std::move(picture);
}

TEST(MaskPicture, DrawsCellsOfSeveralScores) {
  const Problem p = WithMask(masks::Causal(), 8, 16);
  EXPECT_EQ(Draw(p, 4, 4).Text(),
            "+...\n"
            "+...\n"
            "#+..\n"
            "#+..\n");
  EXPECT_DOUBLE_EQ(Draw(p, 4, 4).Share(0, 0), 3.0 / 8);
}

TEST(MaskPicture, DrawsEachScoreOfASmallMask) {
  EXPECT_EQ(Draw(WithMask(masks::Window(1, 0), 3, 4), 32, 64).Text(),
            "#...\n"
            "##..\n"
            ".##.\n");
}

// Cells at the edge are smaller, and what is not there does not count.
TEST(MaskPicture, CutsItsLastCells) {
  EXPECT_EQ(Draw(WithMask(masks::All(), 7, 10), 4, 4).Text(), "####\n####\n####\n####\n");
}

// Larger than the largest tile times the cells: a cell is several tiles.
TEST(MaskPicture, GathersTilesOfALongMask) {
  EXPECT_EQ(Draw(WithMask(masks::Documents({0, 4096, 8192}), 8192, 8192), 2, 4).Text(),
            "##..\n..##\n");
}

TEST(MaskPicture, WritesWhatADecoderReads) {
  const std::string path = absl::StrCat(testing::TempDir(), "/mask.png");
  const MaskPicture picture = Draw(WithMask(masks::Causal(), 8, 16), 4, 4);
  ASSERT_TRUE(picture.WritePng(path).ok());
  png_image image = {};
  image.version = PNG_IMAGE_VERSION;
  ASSERT_NE(png_image_begin_read_from_file(&image, path.c_str()), 0) << image.message;
  image.format = PNG_FORMAT_GRAY;
  ASSERT_EQ(image.width, 4);
  ASSERT_EQ(image.height, 4);
  std::vector<uint8_t> pixels(16);
  ASSERT_NE(png_image_finish_read(&image, nullptr, pixels.data(), 0, nullptr), 0);
  EXPECT_EQ(pixels, (std::vector<uint8_t>{159, 255, 255, 255, 32, 255, 255, 255,  //
                                          0, 159, 255, 255, 0, 32, 255, 255}));
  const absl::Status nowhere = picture.WritePng("/no/such/folder/mask.png");
  EXPECT_EQ(nowhere.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(nowhere.message().rfind("--png: cannot write /no/such", 0), 0) << nowhere;
}

}  // namespace
}  // namespace attnd
