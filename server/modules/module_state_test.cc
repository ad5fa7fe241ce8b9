#include "server/modules/module_state.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "modules/known_layers.h"
#include "modules/reference/reference_engine.h"
#include "server/call/status_details.h"
#include "server/modules/running_digest.h"

namespace attnd {
namespace {

namespace fs = std::filesystem;

class State : public ::testing::Test {
 protected:
  State() {
    fs::remove_all(folder_);
    fs::create_directory(folder_);
  }
  ~State() override { fs::remove_all(folder_); }

  std::unique_ptr<ModuleInstance> NewInstance() {
    auto graph = ModuleGraph::Make(OneLinear());
    CHECK(graph.ok()) << graph.status();
    OptimizerSpec sgd{.kind = OptimizerKind::kSgd, .momentum = 0.5};
    auto module = std::make_shared<const ModuleDescription>(*std::move(graph), sgd);
    const ModuleLimits limits{.max_rows = 8};
    auto plan = engine_.Plan(*module, limits, int64_t{1} << 20);
    CHECK(plan.ok()) << plan.status();
    auto instance = engine_.Make(module, limits, *plan);
    CHECK(instance.ok());
    return *std::move(instance);
  }
  std::unique_ptr<ModuleState> Open(const std::string& module = "m") {
    auto state = ModuleState::Open({folder_, is_disk_}, "caller", "name", module, Told());
    CHECK(state.ok()) << state.status();
    return *std::move(state);
  }
  static void Fill(ModuleInstance& instance, float value) {
    const std::vector<float> numbers(64, value);
    const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(numbers.data()),
                                            numbers.size() * sizeof(float));
    for (const TensorRole role : {TensorRole::kWeight, TensorRole::kMoment1}) {
      CHECK(instance.Put(0, role, ElementType::kFloat32, bytes).ok());
    }
    instance.SetOptimizerStep(static_cast<int64_t>(value));
  }
  static float Read(const ModuleInstance& instance, TensorRole role) {
    std::vector<float> numbers(64);
    CHECK(instance
              .Get(0, role, ElementType::kFloat32,
                   {reinterpret_cast<std::byte*>(numbers.data()), 256})
              .ok());
    return numbers[63];
  }
  void SaveTwice() {
    auto state = Open();
    auto instance = NewInstance();
    Fill(*instance, 1);
    CHECK(state->Save(*instance, {1, "one", "first"}).ok());
    Fill(*instance, 2);
    CHECK(state->Save(*instance, {2, "two", std::string("se\0cond", 7)}).ok());
  }
  std::string File(const std::string& name) {
    return fs::directory_iterator(folder_)->path().string() + "/" + name;
  }

  ModuleState::Saved Told() {
    return [this](const absl::Status& status, int64_t bytes) {
      EXPECT_EQ(bytes, 64 * 4 * 2);
      ++(status.ok() ? saved_ : failed_);
    };
  }

  bool is_disk_ = false;
  int saved_ = 0, failed_ = 0;
  const std::string folder_ = testing::TempDir() + "/states";
  ReferenceEngine engine_;
};

TEST_F(State, GivesTheLastOneBack) {
  SaveTwice();
  auto instance = NewInstance();
  auto state = Open();
  auto loaded = state->Load(*instance);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ASSERT_TRUE(loaded->has_value());
  EXPECT_EQ((*loaded)->sequence, 2);
  EXPECT_EQ((*loaded)->digest, "two");
  EXPECT_EQ((*loaded)->reply, std::string("se\0cond", 7));
  EXPECT_EQ(instance->optimizer_step(), 2);
  EXPECT_EQ(Read(*instance, TensorRole::kWeight), 2);
  EXPECT_EQ(Read(*instance, TensorRole::kMoment1), 2);
}

TEST_F(State, HasNoneAtFirstAndAfterItIsForgotten) {
  auto instance = NewInstance();
  auto none = Open()->Load(*instance);
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(none->has_value());
  SaveTwice();
  Open()->Forget();
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(State, StandsUntilTheNextOneIsWhole) {
  SaveTwice();  // the second is in slot b
  std::ofstream(File("a.safetensors"), std::ios::trunc) << "half";
  std::ofstream(File("commit.next"), std::ios::trunc) << "attnd mod";
  auto instance = NewInstance();
  auto state = Open();
  EXPECT_EQ((*state->Load(*instance))->sequence, 2);
  Fill(*instance, 3);
  EXPECT_TRUE(state->Save(*instance, {3, "three", ""}).ok());
  std::ofstream(File("b.safetensors"), std::ios::trunc) << "half";  // as of the save after it
  EXPECT_EQ((*state->Load(*instance))->sequence, 3);
}

TEST_F(State, IsNotLoadedWhenItIsDamagedForeignOrHalf) {
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"a bit",
       [&] {
         std::fstream file(File("b.safetensors"), std::ios::in | std::ios::out);
         file.seekp(-1, std::ios::end);
         file.put('x');
       }},
      {"cut", [&] { fs::resize_file(File("b.safetensors"), 100); }},
      {"empty slot", [&] { fs::resize_file(File("b.safetensors"), 0); }},
      {"no slot", [&] { fs::remove(File("b.safetensors")); }},
      {"empty commit", [&] { fs::resize_file(File("commit"), 0); }},
      {"foreign commit", [&] { std::ofstream(File("commit")) << "something else\n"; }},
      {"the other slot",
       [&] {
         fs::copy_file(File("a.safetensors"), File("b.safetensors"),
                       fs::copy_options::overwrite_existing);
       }},
  };
  for (const auto& [name, damage] : cases) {
    SaveTwice();
    damage();
    auto instance = NewInstance();
    EXPECT_EQ(Open()->Load(*instance).status().code(), absl::StatusCode::kDataLoss) << name;
    EXPECT_EQ(Read(*instance, TensorRole::kWeight), 0) << name;
    Open()->Forget();
  }
  SaveTwice();
  auto instance = NewInstance();
  EXPECT_EQ(Open("another layout")->Load(*instance).status().code(), absl::StatusCode::kDataLoss);
}

// The commit record says that the bytes are right; what they say is looked at all the same.
TEST_F(State, IsNotLoadedWhenItsHeaderIsNonsense) {
  const std::string big(8, '\xff');
  const std::string two({2, 0, 0, 0, 0, 0, 0, 0});
  for (const std::string& bytes : {big, two + "{}", two + "[]", two + "x", std::string("1234")}) {
    SaveTwice();
    std::ofstream(File("b.safetensors"), std::ios::trunc) << bytes;
    RunningDigest digest;
    digest.Add(bytes);
    std::string hex;
    for (const char byte : digest.Final()) {
      constexpr char kDigits[] = "0123456789abcdef";
      hex += kDigits[(byte >> 4) & 15];
      hex += kDigits[byte & 15];
    }
    std::ofstream(File("commit")) << "attnd module state 1\nb\n" << hex << "\n";
    auto instance = NewInstance();
    EXPECT_EQ(Open()->Load(*instance).status().code(), absl::StatusCode::kDataLoss);
    Open()->Forget();
  }
}

TEST_F(State, TellsOfEachSaveAndKeepsTheLastOneWhenADiskIsInTheWay) {
  is_disk_ = true;
  SaveTwice();
  EXPECT_EQ(saved_, 2);
  auto instance = NewInstance();
  auto state = Open();
  ASSERT_TRUE(state->Load(*instance).ok());
  fs::remove(File("a.safetensors"));
  fs::create_directory(File("a.safetensors"));  // cannot be written
  Fill(*instance, 3);
  EXPECT_EQ(state->Save(*instance, {3, "three", ""}).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(failed_, 1);
  auto again = NewInstance();
  EXPECT_EQ((*state->Load(*again))->sequence, 2);
  EXPECT_EQ(Read(*again, TensorRole::kWeight), 2);
}

TEST_F(State, BelongsToOneProcess) {
  auto state = Open();
  EXPECT_EQ(ReasonOf(ModuleState::Open({folder_}, "caller", "name", "m", Told()).status()),
            reason::kModuleExists);
  EXPECT_TRUE(ModuleState::Open({folder_}, "other", "name", "m", Told()).ok());
}

}  // namespace
}  // namespace attnd
