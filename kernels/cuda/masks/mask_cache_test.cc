// Tests which masks stay on a device, for how long, and that each is uploaded once.
#include "kernels/cuda/masks/mask_cache.h"

#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "tests/emulator/device/emulated_device.h"

namespace attnd::cuda {
namespace {

constexpr MaskTiling kTiling = {128, 32, false};

std::shared_ptr<const CompiledMask> Window(int32_t left) {
  const MaskCall call = {1, 1, 256, 256, {0}};
  const MaskExpr window = {.op = RelativeWindow{left, 0}, .of = {}};
  auto mask = MaskDescription::Make({.pattern = {window}, .pattern_of = {0}}, call);
  EXPECT_TRUE(mask.ok()) << mask.status();
  auto compiled = CompiledMask::Make(**mask, {}, call, OptionsOf(kTiling));
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  return std::make_shared<const CompiledMask>(*std::move(compiled));
}

TEST(MaskCache, KeepsThoseUsedLastUpToItsLimit) {
  auto device = MakeEmulatedDevice({.mask_bytes = 3000});
  MaskCache cache(*device);
  std::vector<std::shared_ptr<const CompiledMask>> masks;
  for (int32_t n = 0; n < 4; ++n) masks.push_back(Window(n));
  const HeldMask* first = cache.Find(masks[0], 1000).get();
  cache.Find(masks[1], 1000);
  cache.Find(masks[2], 1000);
  EXPECT_EQ(cache.Find(masks[0], 1000).get(), first);
  EXPECT_EQ(cache.bytes(), 3000);
  const auto last = cache.Find(masks[3], 1000);  // pushes out masks[1]
  EXPECT_EQ(cache.bytes(), 3000);
  EXPECT_EQ(cache.Find(masks[0], 1000).get(), first);
  EXPECT_EQ(cache.Find(Window(9), 3001), nullptr) << "more than it may take";
}

TEST(MaskCache, DropsNothingThatIsInUse) {
  auto device = MakeEmulatedDevice({.mask_bytes = 1500});
  MaskCache cache(*device);
  const auto one = Window(1), two = Window(2);
  auto used = cache.Find(one, 1000);
  ASSERT_NE(used, nullptr);
  EXPECT_EQ(cache.Find(two, 1000), nullptr);
  used.reset();
  EXPECT_NE(cache.Find(two, 1000), nullptr);
  EXPECT_EQ(cache.bytes(), 1000);
}

TEST(HeldMask, IsUploadedOnce) {
  auto device = MakeEmulatedDevice({});
  MaskCache cache(*device);
  const auto mask = Window(40);
  Problem p;
  p.batch = p.q_heads = 1;
  const MaskLayout layout = LayOutMask(*mask, p, kTiling);
  const auto held = cache.Find(mask, layout.bytes);
  ASSERT_NE(held, nullptr);
  auto launch = device->Begin(64, {});
  ASSERT_TRUE(launch.ok()) << launch.status();
  ASSERT_TRUE(held->Fill(**launch, *mask, p, layout).ok());
  const std::vector<std::byte> image = MaskImage(*mask, p, layout);
  auto* there = reinterpret_cast<std::byte*>(held->memory().address());
  EXPECT_EQ(std::memcmp(there, image.data(), image.size()), 0);
  there[0] = std::byte{0x5a};  // would be overwritten
  ASSERT_TRUE(held->Fill(**launch, *mask, p, layout).ok());
  EXPECT_EQ(there[0], std::byte{0x5a});
}

}  // namespace
}  // namespace attnd::cuda
