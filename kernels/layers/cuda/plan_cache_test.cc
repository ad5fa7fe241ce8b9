#include "kernels/layers/cuda/plan_cache.h"

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "attention/random_problem.h"
#include "base/read_file.h"
#include "gtest/gtest.h"

namespace attnd {
namespace {

const BlockChoice kChoice = {
    {{1, 2, 5}, {1, 5}},
    {{{KernelKind::kProductRowsRows, 768, 3072}, {.small = false, .apart = true}},
     {{KernelKind::kProductDepthDepth, 768, 768}, {.gradient_columns = kWideGradientColumns}}}};

void ExpectSame(const std::optional<BlockChoice>& read, const BlockChoice& choice) {
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->ends.forward, choice.ends.forward);
  EXPECT_EQ(read->ends.backward, choice.ends.backward);
  EXPECT_EQ(read->products, choice.products);
}

std::string FreshPlans(const char* name) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/", name);
  std::filesystem::remove_all(folder);
  return folder;
}

TEST(PlanCache, KeepsWhatWasPut) {
  const std::string folder = FreshPlans("plans_kept");
  PlanCache cache(folder);
  EXPECT_FALSE(cache.Get("a").has_value());
  BlockChoice other = {{{3}, {3}}, {}};
  ASSERT_TRUE(cache.Put("a", other).ok());
  ASSERT_TRUE(cache.Put("b", other).ok());
  ASSERT_TRUE(cache.Put("a", kChoice).ok());
  const PlanCache again(folder);
  ExpectSame(again.Get("a"), kChoice);
  ExpectSame(again.Get("b"), other);
  EXPECT_FALSE(again.Get("c").has_value());
  const std::vector<std::string> lines =
      absl::StrSplit(ReadFile(folder + "/plans.jsonl"), '\n', absl::SkipEmpty());
  EXPECT_EQ(lines.size(), 2);
}

TEST(PlanCache, ForgetsTheOldest) {
  const std::string folder = FreshPlans("plans_old");
  PlanCache cache(folder);
  for (size_t n = 0; n <= PlanCache::kMostLines; ++n) {
    ASSERT_TRUE(cache.Put(absl::StrCat(n), kChoice).ok());
  }
  EXPECT_FALSE(cache.Get("0").has_value());
  ExpectSame(cache.Get("1"), kChoice);
  ExpectSame(cache.Get(absl::StrCat(PlanCache::kMostLines)), kChoice);
  BlockChoice large = kChoice;
  large.ends.forward.resize(PlanCache::kMostLineBytes);
  EXPECT_FALSE(cache.Put("large", large).ok());
}

TEST(PlanCache, TakesDamagedLinesForAbsent) {
  const std::string good = FormatPlanLine("good", kChoice);
  const std::string lines[] = {
      "",
      "{",
      "null",
      "[]",
      "17",
      std::string(PlanCache::kMostLineBytes, '['),
      std::string(PlanCache::kMostLineBytes + 1, ' ') + good,
      std::string("\0\xff\xfe", 3),
      R"({"key":"k"})",
      R"({"key":7,"forward":[1],"backward":[1]})",
      R"({"key":"k","forward":1,"backward":[1]})",
      R"({"key":"k","forward":[-1],"backward":[1]})",
      R"({"key":"k","forward":[1.5],"backward":[1]})",
      R"({"key":"k","forward":[1e30],"backward":[1]})",
      R"({"key":"k","forward":[18446744073709551616],"backward":[1]})",
      R"({"key":"k","forward":[4294967296],"backward":[1]})",
      R"({"key":"k","forward":["1"],"backward":[1]})",
      R"({"key":"k","forward":[[1]],"backward":[1]})",
      R"({"key":"k","forward":[1],"backward":[1],"products":{}})",
      R"({"key":"k","forward":[1],"backward":[1],"products":[1]})",
      R"({"key":"k","forward":[1],"backward":[1],"products":[)"
      R"({"kind":"step","columns":1,"other":1}]})",
      R"({"key":"k","forward":[1],"backward":[1],"products":[{"kind":"rows_rows","columns":1}]})",
      R"({"key":"k","forward":[1],"backward":[1],"products":[)"
      R"({"kind":"depth_depth","columns":1,"other":1,"gradient_columns":64}]})",
  };
  const std::string folder = FreshPlans("plans_damaged");
  std::filesystem::create_directories(folder);
  {
    std::ofstream file(folder + "/plans.jsonl", std::ios::binary);
    for (const std::string& line : lines) {
      EXPECT_FALSE(ParsePlanLine(line).has_value()) << line.substr(0, 80);
      file << line << "\n";
    }
    file << good << "\nwithout an end";
  }
  PlanCache cache(folder);
  ExpectSame(cache.Get("good"), kChoice);
  EXPECT_FALSE(cache.Get("k").has_value());
  ASSERT_TRUE(cache.Put("next", kChoice).ok());
  EXPECT_EQ(ReadFile(folder + "/plans.jsonl"),
            absl::StrCat(FormatPlanLine("next", kChoice), "\n", good, "\n"));
}

// Whatever is read can be written and read again.
TEST(PlanCache, ReadsChangedLinesWithoutHarm) {
  int read = 0;
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    Random random(seed);
    std::string line = FormatPlanLine("key", kChoice);
    for (int64_t n = random.Between(1, 4); n > 0; --n) {
      const auto at = static_cast<size_t>(random.Between(0, static_cast<int64_t>(line.size()) - 1));
      switch (random.Between(0, 3)) {
        case 0:
          line[at] = static_cast<char>(random.Between(0, 255));
          break;
        case 1:
          line.erase(at, static_cast<size_t>(random.Between(1, 9)));
          break;
        case 2:
          line.insert(at, line.substr(0, static_cast<size_t>(random.Between(1, 20))));
          break;
        default:
          line[at] = "0123456789{}[],:\"-.e"[random.Between(0, 19)];
      }
      if (line.empty()) line = "x";
    }
    const auto parsed = ParsePlanLine(line);
    if (!parsed.has_value()) continue;
    ++read;
    const auto again = ParsePlanLine(FormatPlanLine(parsed->first, parsed->second));
    ASSERT_TRUE(again.has_value()) << line;
    EXPECT_EQ(again->first, parsed->first);
    ExpectSame(again->second, parsed->second);
  }
  EXPECT_GT(read, 100);
}

TEST(PlanCache, SaysWhyItCannotWriteAndReadsNoPipe) {
  const std::string folder = FreshPlans("plans_pipe");
  std::filesystem::create_directories(folder);
  ASSERT_EQ(mkfifo((folder + "/plans.jsonl").c_str(), 0600), 0);
  EXPECT_FALSE(PlanCache(folder).Get("a").has_value());
  const std::string file = folder + "/file";
  std::ofstream(file) << "no folder";
  const absl::Status status = PlanCache(file).Put("a", kChoice);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace attnd
