#include "proto/attnd/v1/rows_codec.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "modules/check_rows.h"

namespace attnd {
namespace {

ModuleGraph GraphWith(AttentionOp attention, int64_t memory_width = 0) {
  ModuleLayout layout{.width = 8, .memory_width = memory_width};
  layout.blocks = {{.ops = {{ActivationOp{0, ActivationKind::kTanh}}, {attention}}}};
  layout.layers = {{}};
  return *ModuleGraph::Make(layout);
}

ModuleGraph SelfGraph() {
  AttentionOp attention{.q = {2, 0, 2, 4}, .k = {2, 0, 2, 4}, .v = {2, 0, 2, 4}};
  attention.options.causal = true;
  return GraphWith(attention);
}
ModuleGraph CrossGraph() {
  return GraphWith({.q = {2, 0, 2, 4}, .k = {1, 0, 2, 4}, .v = {1, 0, 2, 4}}, 8);
}

v1::Rows Dense() {
  v1::Rows rows;
  rows.set_batch(2);
  rows.set_length(5);
  return rows;
}
v1::Rows Packed() {
  v1::Rows rows;
  rows.set_batch(2);
  for (uint32_t n : {0, 3, 7}) rows.mutable_lengths()->add_cu_seqlens_q(n);
  return rows;
}

absl::Status Status(const ModuleGraph& graph, const v1::Rows& wire) {
  auto rows = DecodeRows(wire);
  return rows.ok() ? CheckRows(graph, *rows) : rows.status();
}

TEST(RowsCodec, EachFieldArrives) {
  v1::Rows wire = Dense();
  wire.mutable_lengths()->add_kv_len(5);
  wire.mutable_lengths()->add_kv_len(0);
  for (uint32_t n : {2, 1, 5, 5}) wire.mutable_bool_mask()->add_shape(n);
  for (uint32_t n = 0; n < 10; ++n) wire.add_position(100 + n);
  wire.set_first_row(15);
  wire.set_first_sequence(3);
  wire.set_memory_length(4);
  wire.mutable_memory_lengths()->add_kv_len(4);
  wire.mutable_memory_lengths()->add_kv_len(1);
  auto rows = DecodeRows(wire);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->rows(), 10);
  EXPECT_EQ(rows->memory_rows(), 8);
  EXPECT_EQ(rows->kv_lengths, (std::vector<int32_t>{5, 0}));
  EXPECT_EQ(rows->bool_mask->shape, (BroadcastShape{2, 1, 5, 5}));
  EXPECT_EQ(rows->ResolvedPositions()[9], 109u);
  EXPECT_EQ(rows->first_row, 15);
  EXPECT_EQ(rows->first_sequence, 3);
  EXPECT_EQ(rows->memory_kv_lengths, (std::vector<int32_t>{4, 1}));
  AttentionOp attention{.q = {2, 0, 2, 4}, .k = {2, 0, 2, 4}, .v = {2, 0, 2, 4}};
  const absl::Status status = CheckRows(GraphWith(attention, 8), *rows);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(RowsCodec, PackedPositionsCountInEachSequence) {
  auto rows = DecodeRows(Packed());
  ASSERT_TRUE(rows.ok());
  EXPECT_TRUE(CheckRows(SelfGraph(), *rows).ok());
  EXPECT_EQ(rows->rows(), 7);
  EXPECT_EQ(rows->ResolvedPositions(), (std::vector<uint32_t>{0, 1, 2, 0, 1, 2, 3}));
}

struct BadRows {
  std::string message;
  v1::Rows rows;
  std::function<void(v1::Rows&)> spoil;
};

void ExpectRowsRefused(const ModuleGraph& graph, const std::vector<BadRows>& cases) {
  for (const BadRows& bad : cases) {
    v1::Rows rows = bad.rows;
    bad.spoil(rows);
    const absl::Status status = Status(graph, rows);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_EQ(status.message(), bad.message);
  }
}

TEST(RowsCodec, RefusesRowsByTheirField) {
  ExpectRowsRefused(
      SelfGraph(),
      {{"rows.batch: expected 1..1048576, got 0", Dense(), [](auto& r) { r.set_batch(0); }},
       {"rows.length: expected 1..1048576, got 1048577", Dense(),
        [](auto& r) { r.set_length(1048577); }},
       {"rows.lengths.cu_seqlens_q: expected batch + 1 = 3 entries, got 0", Dense(),
        [](auto& r) { r.set_length(0); }},
       {"rows.lengths.cu_seqlens_q: expected none in a dense layout, got some", Packed(),
        [](auto& r) { r.set_length(3); }},
       {"rows.lengths.cu_seqlens_q[1]: expected 0..1048576, got 1048577", Packed(),
        [](auto& r) { r.mutable_lengths()->set_cu_seqlens_q(1, 1048577); }},
       {"rows.lengths.cu_seqlens_q[2]: expected 3..1048576, got 2", Packed(),
        [](auto& r) { r.mutable_lengths()->set_cu_seqlens_q(2, 2); }},
       {"rows.lengths.cu_seqlens_q[0]: expected 0, got 1", Packed(),
        [](auto& r) { r.mutable_lengths()->set_cu_seqlens_q(0, 1); }},
       {"rows.lengths.cu_seqlens_k: expected none, got 1", Packed(),
        [](auto& r) { r.mutable_lengths()->add_cu_seqlens_k(0); }},
       {"rows.lengths.kv_len: expected batch = 2 entries, got 1", Dense(),
        [](auto& r) { r.mutable_lengths()->add_kv_len(1); }},
       {"rows.lengths.kv_len[1]: expected 0..5, got 6", Dense(),
        [](auto& r) {
          r.mutable_lengths()->add_kv_len(1);
          r.mutable_lengths()->add_kv_len(6);
        }},
       {"rows: block[0].op[1].attention: problem.alignment: expected top_left, bottom_right or "
        "offsets, since causal, window or ALiBi depend on it and the lengths of queries and keys "
        "differ, got none",
        Dense(),
        [](auto& r) {
          r.mutable_lengths()->add_kv_len(1);
          r.mutable_lengths()->add_kv_len(5);
        }},
       {"rows: block[0].op[1].attention: problem.bool_mask.shape[3]: expected 1 or 5, got 6",
        Dense(),
        [](auto& r) {
          for (int n : {1, 1, 1, 6}) r.mutable_bool_mask()->add_shape(n);
        }},
       {"rows.bool_mask.shape: expected 4 entries, got 0", Dense(),
        [](auto& r) { r.mutable_bool_mask(); }},
       {"rows.position: expected none or 10 entries, got 1", Dense(),
        [](auto& r) { r.add_position(1); }},
       {"rows.first_row: expected first_sequence · length = 5, got 4", Dense(),
        [](auto& r) {
          r.set_first_sequence(1);
          r.set_first_row(4);
        }},
       {"rows.first_row: expected at most 4294967296, got 4294967297", Dense(),
        [](auto& r) { r.set_first_row((uint64_t{1} << 32) + 1); }},
       {"rows.first_row and rows: expected 1..4294967296, got 4294967303", Packed(),
        [](auto& r) { r.set_first_row(uint64_t{1} << 32); }},
       {"rows.memory_length: expected none since memory_width is 0, got some", Dense(),
        [](auto& r) { r.set_memory_length(1); }}});
  ExpectRowsRefused(CrossGraph(),
                    {{"rows.memory_length: expected 1..1048576, got 0", Dense(), [](auto&) {}},
                     {"rows.memory_lengths.cu_seqlens_k: expected batch + 1 = 3 entries, got 0",
                      Packed(), [](auto&) {}},
                     {"rows.memory_lengths.kv_len[0]: expected 0..4, got 5", Dense(), [](auto& r) {
                        r.set_memory_length(4);
                        r.mutable_memory_lengths()->add_kv_len(5);
                        r.mutable_memory_lengths()->add_kv_len(5);
                      }}});
}

}  // namespace
}  // namespace attnd
