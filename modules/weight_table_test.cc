#include "modules/weight_table.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/layers/random_module.h"

namespace attnd {
namespace {

TEST(WeightTable, NamesAndPlacesAreThoseOfLayersInOrder) {
  ModuleLayout layout{.width = 8};
  layout.blocks = {{.parameters = {{"w", {8, 8}}, {"b", {8}}},
                    .ops = {{LinearOp{.input = 0, .weight = 0, .bias = 1}}}}};
  layout.layers = {{.prefix = "h.0."}, {.prefix = "h.1.", .frozen = {0}}};
  const ModuleGraph graph = *ModuleGraph::Make(layout);
  const WeightTable table(graph);
  ASSERT_EQ(table.entries().size(), 4);
  EXPECT_EQ(table.entries()[2].name, "h.1.w");
  EXPECT_EQ(table.Of(1, 1).name, "h.1.b");
  EXPECT_EQ(table.Of(1, 1).offset, 64 + 64 + 64);
  EXPECT_EQ(table.Of(0, 1).trained_offset, 64);
  EXPECT_EQ(table.Of(1, 0).trained_offset, std::nullopt);
  EXPECT_EQ(table.Of(1, 1).trained_offset, 128);
  EXPECT_EQ(table.elements(), 256);
  EXPECT_EQ(table.trained_elements(), 192);
  EXPECT_EQ(table.matrix_elements(), 128);
  EXPECT_EQ(table.Find("h.0.b"), &table.entries()[1]);
  EXPECT_EQ(table.Find("h.2.b"), nullptr);
}

int64_t TableHeapBytes() {
  const struct mallinfo2 heap = mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
}

TEST(WeightTable, TakesNoMoreThanItSaysBeforehand) {
  for (int64_t parameters : {1, 7, 64}) {
    for (int64_t layers : {1, 9, 512}) {
      for (size_t name_bytes : {4, 16, 100}) {
        ModuleLayout layout{.width = 8};
        ModuleBlock& block = layout.blocks.emplace_back();
        for (int64_t n = 0; n < parameters; ++n) {
          block.parameters.push_back({absl::StrCat(std::string(name_bytes, 'w'), n), {8, 8}});
          block.ops.push_back({LinearOp{.input = n == 0 ? 0 : n + 1, .weight = n}});
        }
        for (int64_t n = 0; n < layers; ++n) {
          layout.layers.push_back({.prefix = absl::StrCat(std::string(name_bytes, 'l'), n, ".")});
        }
        const ModuleGraph graph = *ModuleGraph::Make(layout);
        const int64_t before = TableHeapBytes();
        const WeightTable table(graph);
        EXPECT_LE(TableHeapBytes() - before, WeightTable::BytesOf(graph))
            << parameters << " parameters, " << layers << " layers, " << name_bytes;
      }
    }
  }
}

TEST(WeightTable, PlacesNeverOverlapAndAreAligned) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const ModuleGraph graph = *ModuleGraph::Make(RandomLayout(random));
    const WeightTable table(graph);
    int64_t end = 0, trained_end = 0;
    for (const WeightEntry& entry : table.entries()) {
      EXPECT_GE(entry.offset, end);
      EXPECT_EQ(entry.offset % kWeightAlignment, 0);
      EXPECT_EQ(table.Find(entry.name), &entry);
      end = entry.offset + entry.elements;
      if (!entry.trained_offset.has_value()) continue;
      EXPECT_GE(*entry.trained_offset, trained_end);
      trained_end = *entry.trained_offset + entry.elements;
    }
    EXPECT_LE(end, table.elements());
    EXPECT_LE(trained_end, table.trained_elements());
  }
}

}  // namespace
}  // namespace attnd
