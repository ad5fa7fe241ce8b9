#include "server/modules/module_state.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
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
    fs::permissions(folder_, fs::perms::owner_all);
    OpenRoot();
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
  void OpenRoot(const StateLimits& limits = {}) {
    auto root = StateRoot::Open(folder_, limits);
    CHECK(root.ok()) << root.status();
    root_ = *std::move(root);
  }
  absl::StatusOr<std::unique_ptr<ModuleState>> OpenOf(const std::string& caller,
                                                      const std::string& name,
                                                      const std::string& module = "m",
                                                      int64_t bytes = 4096) {
    return ModuleState::Open({root_.get(), is_disk_}, {caller, name, module}, bytes, Told());
  }
  std::unique_ptr<ModuleState> Open(const std::string& module = "m") {
    auto state = OpenOf("caller", "name", module);
    CHECK(state.ok()) << state.status();
    return *std::move(state);
  }
  // The sequence that is loaded; −1: none.
  int64_t Loads(const std::string& module = "m") {
    auto instance = NewInstance();
    auto loaded = Open(module)->Load(*instance);
    CHECK(loaded.ok()) << loaded.status();
    was_damaged_ = !loaded->damage.ok();
    const bool found = loaded->change.has_value();
    weight_ = Read(*instance, TensorRole::kWeight);
    return found ? static_cast<int64_t>(loaded->change->sequence) : -1;
  }
  void Commit(const std::string& slot, const std::string& bytes) {
    std::ofstream(File(slot + ".safetensors"), std::ios::trunc) << bytes;
    RunningDigest digest;
    digest.Add(bytes);
    std::ofstream(File("commit")) << "attnd module state 1\n"
                                  << slot << "\n"
                                  << absl::BytesToHexString(digest.Final()) << "\n";
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
  std::unique_ptr<StateRoot> root_;
  bool was_damaged_ = false;  // Loads
  float weight_ = 0;
  ReferenceEngine engine_;
};

TEST_F(State, GivesTheLastOneBack) {
  SaveTwice();
  auto instance = NewInstance();
  auto state = Open();
  auto loaded = state->Load(*instance);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->damage.ok());
  ASSERT_TRUE(loaded->change.has_value());
  EXPECT_EQ(loaded->change->sequence, 2);
  EXPECT_EQ(loaded->change->digest, "two");
  EXPECT_EQ(loaded->change->reply, std::string("se\0cond", 7));
  EXPECT_EQ(instance->optimizer_step(), 2);
  EXPECT_EQ(Read(*instance, TensorRole::kWeight), 2);
  EXPECT_EQ(Read(*instance, TensorRole::kMoment1), 2);
}

TEST_F(State, HasNoneAtFirstAndAfterItIsForgotten) {
  EXPECT_EQ(Loads(), -1);
  EXPECT_FALSE(was_damaged_);
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
  EXPECT_EQ(state->Load(*instance)->change->sequence, 2);
  Fill(*instance, 3);
  EXPECT_TRUE(state->Save(*instance, {3, "three", ""}).ok());
  std::ofstream(File("b.safetensors"), std::ios::trunc) << "half";  // as of the save after it
  EXPECT_EQ(state->Load(*instance)->change->sequence, 3);
}

TEST_F(State, IsTheOneBeforeWhenTheLastIsDamaged) {
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"a bit",
       [&] {
         std::fstream file(File("b.safetensors"), std::ios::in | std::ios::out);
         file.seekp(-1, std::ios::end);
         file.put('x');
       }},
      {"cut", [&] { fs::resize_file(File("b.safetensors"), 100); }},
      {"longer", [&] { fs::resize_file(File("b.safetensors"), 10 << 20); }},
      {"empty slot", [&] { fs::resize_file(File("b.safetensors"), 0); }},
      {"no slot", [&] { fs::remove(File("b.safetensors")); }},
      {"a FIFO",
       [&] {
         fs::remove(File("b.safetensors"));
         ASSERT_EQ(mkfifo(File("b.safetensors").c_str(), 0600), 0);
       }},
      {"a link to an endless file",
       [&] {
         fs::remove(File("b.safetensors"));
         fs::create_symlink("/dev/zero", File("b.safetensors"));
       }},
      {"the other slot",
       [&] {
         fs::copy_file(File("a.safetensors"), File("b.safetensors"),
                       fs::copy_options::overwrite_existing);
       }},
  };
  for (const auto& [name, damage] : cases) {
    SaveTwice();
    damage();
    EXPECT_EQ(Loads(), 1) << name;
    EXPECT_TRUE(was_damaged_) << name;
    EXPECT_EQ(weight_, 1) << name;
    {
      auto state = Open();
      auto instance = NewInstance();
      ASSERT_TRUE(state->Load(*instance).ok());
      Fill(*instance, 5);
      EXPECT_TRUE(state->Save(*instance, {5, "", ""}).ok()) << name;  // in the damaged one's place
    }
    EXPECT_EQ(Loads(), 5) << name;
    Open()->Forget();
  }
}

TEST_F(State, IsNotLoadedWhenItIsForeignOrBothAreDamaged) {
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"empty commit", [&] { fs::resize_file(File("commit"), 0); }},
      {"foreign commit", [&] { std::ofstream(File("commit")) << "something else\n"; }},
      {"a huge commit", [&] { fs::resize_file(File("commit"), int64_t{1} << 40); }},
      {"a FIFO",
       [&] {
         fs::remove(File("commit"));
         ASSERT_EQ(mkfifo(File("commit").c_str(), 0600), 0);
       }},
      {"both",
       [&] {
         for (const char* file : {"a.safetensors", "b.safetensors"}) {
           fs::resize_file(File(file), 100);
         }
       }},
  };
  for (const auto& [name, damage] : cases) {
    SaveTwice();
    damage();
    EXPECT_EQ(Loads(), -1) << name;
    EXPECT_TRUE(was_damaged_) << name;
    EXPECT_EQ(weight_, 0) << name;
    Open()->Forget();
  }
  SaveTwice();
  EXPECT_EQ(Loads("another layout"), -1);
  EXPECT_TRUE(was_damaged_);
}

// The commit record says that the bytes are right; what they say is looked at all the same.
TEST_F(State, IsNotLoadedWhenItsHeaderIsNonsense) {
  SaveTwice();
  std::ifstream file(File("b.safetensors"), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto with = [&](const std::string& text) {
    // As long as the header that was there, so that the file's size is right.
    std::string padded = text + std::string(whole.size() - 8 - 64 * 8 - text.size(), ' ');
    return whole.substr(0, 8) + padded + whole.substr(whole.size() - 64 * 8);
  };
  EXPECT_EQ(Loads(), 2);
  std::string number = whole;
  number.replace(number.find("\"sequence\":\"2\""), 14, "\"sequence\": 12");
  const std::string hex = absl::BytesToHexString("m");
  const std::string other_length = std::string(8, '\xff') + whole.substr(8);
  for (const std::string& bytes :
       {with("{}"), with("[]"), with("x"), with("{\"__metadata__\": []}"),
        with("{\"__metadata__\": {\"module\": 7}}"),
        with("{\"__metadata__\": {\"module\": \"" + hex + "\"}}"),
        with("{\"__metadata__\": {\"module\": \"" + hex + "\"}, \"weight/weight\": 3}"),
        with(std::string(100, '[')), number, other_length, std::string("1234")}) {
    Commit("b", bytes);
    EXPECT_EQ(Loads(), -1) << bytes.substr(0, 100);
    EXPECT_TRUE(was_damaged_);
  }
  Commit("b", whole);
  EXPECT_EQ(Loads(), 2);
}

// Links that another user has put where files are to be.
TEST_F(State, NeverFollowsALink) {
  SaveTwice();
  const std::string mine = testing::TempDir() + "/mine", elsewhere = testing::TempDir() + "/moved";
  fs::remove_all(elsewhere);
  std::ofstream(mine) << "untouched";
  for (const char* file : {"a.safetensors", "commit.next"}) {
    fs::remove(File(file));
    fs::create_symlink(mine, File(file));
  }
  auto instance = NewInstance();
  auto state = Open();
  ASSERT_TRUE(state->Load(*instance).ok());
  EXPECT_TRUE(state->Save(*instance, {3, "", ""}).ok());
  EXPECT_EQ(fs::file_size(mine), 9);
  EXPECT_FALSE(fs::is_symlink(File("a.safetensors")));
  state.reset();
  EXPECT_EQ(Loads(), 3);

  const std::string folder = fs::path(File("commit")).parent_path();
  fs::rename(folder, elsewhere);
  fs::create_directory_symlink(elsewhere, folder);
  const absl::Status refused = OpenOf("caller", "name").status();
  EXPECT_EQ(ReasonOf(refused), reason::kStateUnavailable);
  EXPECT_EQ(refused.message().find(folder_), std::string::npos) << refused;
}

TEST_F(State, IsRefusedInAFolderThatOthersMayWriteTo) {
  SaveTwice();
  const fs::path folder = fs::path(File("commit")).parent_path();
  fs::permissions(folder, fs::perms::others_write, fs::perm_options::add);
  EXPECT_EQ(ReasonOf(OpenOf("caller", "name").status()), reason::kStateUnavailable);
}

TEST_F(State, HasAFolderOfThisUserAlone) {
  const std::string file = folder_ + "/file";
  std::ofstream(file) << "x";
  for (const std::string& path :
       {file, folder_ + "/missing", folder_ + "/no/folder", std::string("/proc")}) {
    const absl::Status status = StateRoot::Open(path, {}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << path << status;
    EXPECT_EQ(status.message().rfind("--module_state_dir: expected", 0), 0) << status;
  }
  EXPECT_FALSE(fs::exists(folder_ + "/missing"));
  // A volume that belongs to others, as those that Kubernetes gives to a group.
  const std::string in_volume = absl::StrCat("/dev/shm/attnd-state-test-", getpid());
  EXPECT_TRUE(StateRoot::Open(in_volume, {}).ok());
  EXPECT_EQ(fs::status(in_volume).permissions() & fs::perms::all, fs::perms::owner_all);
  EXPECT_TRUE(StateRoot::Open(in_volume, {}).ok());
  fs::remove_all(in_volume);
  for (const fs::perms others : {fs::perms::group_write, fs::perms::others_write}) {
    fs::permissions(folder_, others, fs::perm_options::add);
    EXPECT_TRUE(absl::IsInvalidArgument(StateRoot::Open(folder_, {}).status()));
    fs::permissions(folder_, fs::perms::owner_all);
  }
  EXPECT_TRUE(StateRoot::Open(folder_, {}).ok());
}

TEST_F(State, TakesNoMoreThanItsQuota) {
  OpenRoot({.bytes = 100'000});
  std::vector<std::unique_ptr<ModuleState>> states;
  const auto open = [&](const char* caller, const char* name, int64_t bytes) {
    auto state = OpenOf(caller, name, "m", bytes);
    if (state.ok()) states.push_back(*std::move(state));
    return ReasonOf(state.status());
  };
  EXPECT_EQ(open("a", "1", 50'000), "");
  EXPECT_EQ(open("a", "2", 1), reason::kModuleQuota);  // a caller's half
  EXPECT_EQ(open("b", "1", 40'000), "");
  EXPECT_EQ(open("c", "1", 20'000), reason::kModuleQuota);
  EXPECT_EQ(open("c", "1", 10'000), "");
  EXPECT_EQ(root_->bytes(), 100'000);
  states[1]->Forget();
  states.clear();
  EXPECT_LT(root_->bytes(), 1000);  // what files there are
  // Names of modules that expired, after a restart too.
  SaveTwice();
  const int64_t bytes = root_->bytes();
  EXPECT_GT(bytes, 2 * 64 * 8);
  OpenRoot({.bytes = bytes + 1000});
  EXPECT_EQ(root_->bytes(), bytes);
  EXPECT_EQ(open("d", "1", 1001), reason::kModuleQuota);
  EXPECT_EQ(open("caller", "other", bytes / 2), reason::kModuleQuota);
  EXPECT_EQ(open("d", "1", 100), "");
}

TEST_F(State, GoesWhenItsModuleWasNotRegisteredForLong) {
  OpenRoot({.most_unused = absl::Hours(24)});
  SaveTwice();
  auto used = OpenOf("caller", "in use");
  ASSERT_TRUE(used.ok());
  const absl::Time now = absl::Now();
  root_->Sweep(now + absl::Hours(23));
  EXPECT_EQ(root_->swept(), 0);
  root_->Sweep(now + absl::Hours(25));
  EXPECT_EQ(root_->swept(), 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
  EXPECT_EQ(root_->bytes(), 4096);  // of the one in use
  EXPECT_EQ(Loads(), -1);
  EXPECT_FALSE(was_damaged_);
}

// A process that died may have left a record that was renamed and not synced.
TEST_F(State, SyncsWhatItFindsBeforeThatCountsAsDurable) {
  struct CountingDisk final : public StateDisk {
    explicit CountingDisk(int& of) : syncs(of) {}
    int Sync(int descriptor) override {
      ++syncs;
      return StateDisk::Sync(descriptor);
    }
    int& syncs;
  };
  int syncs = 0;
  root_ = *StateRoot::Open(folder_, {}, std::make_unique<CountingDisk>(syncs));
  SaveTwice();
  EXPECT_EQ(syncs, 0);  // in memory of the host
  is_disk_ = true;
  EXPECT_EQ(Loads(), 2);
  EXPECT_EQ(syncs, 2);  // of the module's folder and of that of all
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
  EXPECT_EQ(state->Load(*again)->change->sequence, 2);
  EXPECT_EQ(Read(*again, TensorRole::kWeight), 2);
}

TEST_F(State, IsNotTakenForLostWhileFilesCannotBeOpened) {
  SaveTwice();
  auto instance = NewInstance();
  auto state = Open();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status refused = state->Load(*instance).status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(ReasonOf(refused), reason::kStateUnavailable) << refused;
  EXPECT_EQ(state->Load(*instance)->change->sequence, 2);
}

TEST_F(State, BelongsToOneProcess) {
  auto state = Open();
  EXPECT_EQ(ReasonOf(OpenOf("caller", "name").status()), reason::kModuleExists);
  EXPECT_TRUE(OpenOf("other", "name").ok());
}

}  // namespace
}  // namespace attnd
