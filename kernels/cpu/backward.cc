// Backward of the CPU engine. Rows that share a KV head are cut into slots (tiles.h); one item
// takes a slot and walks over the keys, tile by tile, and over the slot's query tiles inside:
//   dV_j += (P∘Z)ᵀ·dO_i    dK_j += scale·dSᵀ·Q_i    dQ_i += scale·dS·K_j
// so each of the five products of a pair of tiles is computed once, and dQ_i belongs to one item.
// dK and dV of a tile of keys are added up slot by slot: a slot that comes to a tile waits until
// the one before it has added its share. Items are taken in ascending order of slots, so the one
// that is waited for runs or has run. Nothing depends on which thread runs what. The bias's
// gradient is a pass of its own over the bias's tiles, since its sums run over heads and batch
// entries in a fixed order and a sum per head would take as much memory as S.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/backward.cc"
#include "kernels/cpu/targets.h"
//
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "kernels/cpu/backward_products-inl.h"
#include "kernels/cpu/backward_tile-inl.h"
#include "kernels/cpu/backward_tiles-inl.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/scores-inl.h"
#include "kernels/cpu/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

inline uint8_t* At(void* data, int64_t index, int64_t element_bytes) {
  return static_cast<uint8_t*>(data) + index * element_bytes;
}

template <ElementType kElement>
float DotRows(const void* a, const void* b, int64_t at, int count) {
  const FloatTag d;
  FloatVector sum = hn::Zero(d);
  for (int c = 0; c < count; c += kLanes) {
    sum = hn::MulAdd(LoadFirst<kElement>(a, at + c, count - c),
                     LoadFirst<kElement>(b, at + c, count - c), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

inline float DotRows(ElementType element, const void* a, const void* b, int64_t at, int count) {
  switch (element) {
    case ElementType::kFloat16:
      return DotRows<ElementType::kFloat16>(a, b, at, count);
    case ElementType::kBFloat16:
      return DotRows<ElementType::kBFloat16>(a, b, at, count);
    default:
      return DotRows<ElementType::kFloat32>(a, b, at, count);
  }
}

// delta = rowsum(dO ∘ O) − dlse, and d_sink = −Σ rows exp(logit − lse)·delta. The first query head
// of a KV head also sets its slots' progress to nothing.
void RowSumsImpl(const CpuBackwardCall& call, int64_t b, int64_t h) {
  const Problem& p = *call.problem;
  const BackwardWorkspace work(p, call.workspace);
  const Sequence s = p.SequenceAt(b);
  const TensorStrides strides = OutputStrides(p);
  if (h % p.group_size() == 0) std::fill_n(work.TilesDone(p, b, p.KvHead(h), 0), kMaxSlots, 0);
  double d_sink = 0;
  for (int64_t row = 0; row < s.q_len; ++row) {
    if (row % 1024 == 0 && call.stop.stop_requested()) return;
    const int64_t at = p.LseIndex(b, h, s, row);
    float delta = DotRows(p.element, call.d_o, call.o, strides.Row(b, h, s.q_begin + row),
                          static_cast<int>(p.v_head_dim));
    if (call.d_lse != nullptr) delta -= call.d_lse[at];
    work.delta()[at] = delta;
    if (call.d_sink == nullptr || call.lse[at] == -std::numeric_limits<float>::infinity()) continue;
    d_sink -= std::exp(double{p.sink_logits[h]} - call.lse[at]) * delta;
  }
  if (call.d_sink != nullptr) call.d_sink[b * p.q_heads + h] = static_cast<float>(d_sink);
}

// GradientPass: one item, a slot of one KV head. A residue class is one slot.
template <class Products>
class GradientPass {
 public:
  GradientPass(const CpuBackwardCall& call, const GradientRange& range, Products& products,
               ScratchArena& scratch)
      : call_(call),
        p_(*call.problem),
        work_(p_, call.workspace),
        range_(range),
        rows_(RowClassOf(call, range.batch_index, range.residue)),
        sequence_(rows_.sequence),
        batch_index_(range.batch_index),
        kv_head_(range.kv_head),
        slot_(range.slot),
        slots_(call.residues ? 1 : GradientSlots(p_, sequence_.q_len)),
        q_stride_(PaddedDim(p_.qk_head_dim)),
        products_(products),
        tile_(call, range.residue, products, scratch) {
    const CpuTile& size = tile_.size();
    products_.BeginKeyGradients(scratch);
    d_q_ = scratch.Floats(size.q_rows * q_stride_);
    q_tiles_ = (sequence_.q_len + size.q_rows - 1) / size.q_rows;
  }

  void Run() {
    if (slot_ >= slots_) return;
    ForEachRow([&](float* sum, void*) { std::memset(sum, 0, sizeof(float) * p_.qk_head_dim); });
    const int64_t step = tile_.size().kv_rows;
    for (int64_t key = 0; key < sequence_.kv_len; key += step) {
      if (!VisitKeys(key / step) || !WaitForEarlierSlot(key / step)) return;
      AddKeyGradients(key, HWY_MIN(step, sequence_.kv_len - key));
      if (slots_ == 1) continue;
      TilesDone(slot_).store(static_cast<int32_t>(key / step) + 1, std::memory_order_release);
    }
    if (p_.element != ElementType::kFloat32) {
      ForEachRow([&](float* sum, void* out) {
        StoreRow(p_.element, sum, 1.0f, static_cast<int>(p_.qk_head_dim), out);
      });
    }
    if (slot_ == 0 && range_.residue == 0) ClearOtherKeys();
  }

 private:
  // Query tiles of all heads of the group, in order; every slots_-th is ours.
  template <class Body>
  void ForEachTile(const Body& body) const {
    for (int64_t unit = slot_; unit < p_.group_size() * q_tiles_; unit += slots_) {
      body(kv_head_ * p_.group_size() + unit / q_tiles_, unit % q_tiles_);
    }
  }

  // The float32 sum of dQ of each of our rows, and its place in the result.
  template <class Body>
  void ForEachRow(const Body& body) const {
    const int64_t q_rows = tile_.size().q_rows;
    ForEachTile([&](int64_t head, int64_t q_tile) {
      const int64_t end = HWY_MIN(sequence_.q_len, (q_tile + 1) * q_rows);
      for (int64_t row = q_tile * q_rows; row < end; ++row) {
        const int64_t at = QueryStrides(p_).Row(batch_index_, head, rows_.QueryRow(row));
        body(Sums() + at, At(call_.d_q, at, ElementBytes(p_.element)));
      }
    });
  }

  float* Sums() const {
    return p_.element == ElementType::kFloat32 ? static_cast<float*>(call_.d_q) : work_.d_q();
  }

  bool VisitKeys(int64_t kv_tile) {
    const int64_t step = tile_.size().kv_rows;
    products_.ClearKeyGradients(HWY_MIN(step, sequence_.kv_len - kv_tile * step));
    bool stopped = false;
    ForEachTile([&](int64_t head, int64_t q_tile) {
      stopped = stopped || call_.stop.stop_requested();
      if (stopped || !tile_.Select(batch_index_, head, q_tile, kv_tile)) return;
      tile_.Compute(/*for_bias=*/false);
      tile_.AddGradients(d_q_);
      AddQueryGradient();
    });
    return !stopped;
  }

  void AddQueryGradient() const {
    const FloatTag d;
    const ScoreTile& tile = tile_.tile();
    const int count = static_cast<int>(p_.qk_head_dim);
    const FloatVector scale = hn::Set(d, tile_.rules().scale);
    const TensorStrides strides = QueryStrides(p_);
    const int64_t first =
        strides.Row(batch_index_, tile_.rules().q_head, rows_.QueryRow(tile.first_row));
    const int64_t step = rows_.Stepping(strides).row;
    for (int r = 0; r < tile.rows; ++r) {
      const float* from = d_q_ + r * q_stride_;
      float* to = Sums() + first + r * step;
      for (int c = 0; c < count; c += kLanes) {
        FloatVector sum = LoadFirst<ElementType::kFloat32>(to, c, count - c);
        sum = hn::MulAdd(scale, hn::LoadU(d, from + c), sum);
        StoreFirst<ElementType::kFloat32>(sum, to, c, count - c);
      }
    }
  }

  std::atomic_ref<int32_t> TilesDone(int64_t slot) const {
    return std::atomic_ref<int32_t>(*work_.TilesDone(p_, batch_index_, kv_head_, slot));
  }

  // False if the call was cancelled: then the earlier slot may never come.
  bool WaitForEarlierSlot(int64_t tile) const {
    if (slot_ == 0) return true;
    while (TilesDone(slot_ - 1).load(std::memory_order_acquire) <= tile) {
      if (call_.stop.stop_requested()) return false;
      std::this_thread::yield();
    }
    return true;
  }

  // Adds our share of dK, dV of a tile of keys to that of the slots before.
  void AddKeyGradients(int64_t first, int64_t rows) const {
    products_.ForEachKey(rows, [&](int64_t r, const float* d_k, const float* d_v) {
      const int64_t row = rows_.KeyRow(first + r);
      AddRow(d_k, p_.ResolvedScale(), static_cast<int>(p_.qk_head_dim),
             KeyStrides(p_).Row(batch_index_, kv_head_, row), work_.d_k(), call_.d_k);
      AddRow(d_v, 1.0f, static_cast<int>(p_.v_head_dim),
             ValueStrides(p_).Row(batch_index_, kv_head_, row), work_.d_v(), call_.d_v);
    });
  }

  // The sum over slots so far stands in `result` if that is float32, else in `sums`; both at `at`.
  void AddRow(const float* row, float factor, int count, int64_t at, float* sums,
              void* result) const {
    const bool is_float = p_.element == ElementType::kFloat32;
    void* out = At(result, at, ElementBytes(p_.element));
    if (slots_ == 1) return StoreRow(p_.element, row, factor, count, out);
    float* sum = is_float ? static_cast<float*>(out) : sums + at;
    if (slot_ == 0) return StoreRow(ElementType::kFloat32, row, factor, count, sum);
    const FloatTag d;
    for (int c = 0; c < count; c += kLanes) {
      const FloatVector share = hn::Mul(hn::Set(d, factor), hn::LoadU(d, row + c));
      const FloatVector total = hn::Add(LoadFirst<ElementType::kFloat32>(sum, c, count - c), share);
      StoreFirst<ElementType::kFloat32>(total, sum, c, count - c);
    }
    if (!is_float && slot_ == slots_ - 1) StoreRow(p_.element, sum, 1.0f, count, out);
  }

  // Keys that are cut off by key lengths, or whose residue no row has, have no gradient.
  void ClearOtherKeys() const {
    const Sequence whole = p_.SequenceAt(batch_index_);
    if (call_.residues && call_.residues->p > whole.q_len) {
      for (int64_t key = 0; key < whole.kv_len; ++key) {
        const int64_t residue = call_.residues->ResidueOfKey(whole, key);
        if (residue >= call_.residues->Count(whole)) ClearKey(whole.kv_begin + key);
      }
    }
    if (IsPacked(p_.layout)) return;
    for (int64_t key = whole.kv_len; key < p_.kv_len; ++key) ClearKey(key);
  }

  void ClearKey(int64_t row) const {
    const int64_t bytes = ElementBytes(p_.element);
    std::memset(At(call_.d_k, KeyStrides(p_).Row(batch_index_, kv_head_, row), bytes), 0,
                p_.qk_head_dim * bytes);
    std::memset(At(call_.d_v, ValueStrides(p_).Row(batch_index_, kv_head_, row), bytes), 0,
                p_.v_head_dim * bytes);
  }

  const CpuBackwardCall& call_;
  const Problem& p_;
  const BackwardWorkspace work_;
  const GradientRange range_;
  const RowClass rows_;
  const Sequence& sequence_;
  const int64_t batch_index_, kv_head_, slot_, slots_;
  const int64_t q_stride_;
  int64_t q_tiles_;
  Products& products_;
  BackwardTile<Products> tile_;
  float* d_q_;  // [rows][q_stride]: of one tile
};

// Calls body(products, scratch) with the best products that there are.
template <class Body>
void WithProducts(const Problem& p, float* scratch, const Body& body) {
  ScratchArena arena(scratch);
#if HWY_TARGET == HWY_AVX3
  if (const TileUnit* unit = TilesFor(p); unit != nullptr) {
    const TileSession session(*unit);
    TiledBackwardProducts products(*unit, p, arena);
    return body(products, arena);
  }
#endif
  BackwardProducts products(p, arena);
  body(products, arena);
}

void GradientItemImpl(const CpuBackwardCall& call, const GradientRange& range, float* scratch) {
  WithProducts(*call.problem, scratch, [&](auto& products, ScratchArena& arena) {
    GradientPass(call, range, products, arena).Run();
  });
}

// BiasPass: one tile of d_bias. Sums run over keys and rows, then heads, then batch entries.
template <class Products>
class BiasPass {
 public:
  BiasPass(const CpuBackwardCall& call, const BiasTile& place, Products& products,
           ScratchArena& scratch)
      : call_(call),
        p_(*call.problem),
        shape_(p_.bias->shape),
        place_(place),
        tile_(call, /*residue=*/0, products, scratch) {
    const int64_t floats = int64_t{tile_.size().q_rows} * tile_.size().kv_rows;
    head_ = scratch.Floats(floats);
    entry_ = scratch.Floats(floats);
    total_ = scratch.Floats(floats);
    rows_ = Extent(shape_.rows, place.row_tile, tile_.size().q_rows);
    columns_ = Extent(shape_.columns, place.column_tile, tile_.size().kv_rows);
  }

  void Run() {
    Clear(total_);
    const bool all_entries = shape_.batch == 1, all_heads = shape_.heads == 1;
    for (int64_t b = all_entries ? 0 : place_.batch;
         b < (all_entries ? p_.batch : place_.batch + 1); ++b) {
      Clear(entry_);
      for (int64_t h = all_heads ? 0 : place_.head; h < (all_heads ? p_.q_heads : place_.head + 1);
           ++h) {
        Clear(head_);
        if (!SumHead(b, h)) return;
        AddTo(entry_, head_);
      }
      AddTo(total_, entry_);
    }
    Write();
  }

 private:
  static int Extent(int64_t size, int64_t tile, int64_t step) {
    return static_cast<int>(HWY_MIN(step, size - tile * step));
  }
  void Clear(float* sums) const { std::fill_n(sums, rows_ * columns_, 0.0f); }
  void AddTo(float* sums, const float* terms) const {
    for (int n = 0; n < rows_ * columns_; ++n) sums[n] += terms[n];
  }

  // False if the call was cancelled.
  bool SumHead(int64_t b, int64_t h) {
    const Sequence s = p_.SequenceAt(b);
    const CpuTile& size = tile_.size();
    const int64_t last_column =
        shape_.columns == 1 ? (s.kv_len - 1) / size.kv_rows : place_.column_tile;
    const int64_t last_row = shape_.rows == 1 ? (s.q_len - 1) / size.q_rows : place_.row_tile;
    for (int64_t column = shape_.columns == 1 ? 0 : place_.column_tile; column <= last_column;
         ++column) {
      for (int64_t row = shape_.rows == 1 ? 0 : place_.row_tile; row <= last_row; ++row) {
        if (call_.stop.stop_requested()) return false;
        if (!tile_.Select(b, h, row, column)) continue;
        tile_.Compute(/*for_bias=*/true);
        AddTile();
      }
    }
    return true;
  }

  void AddTile() {
    for (int r = 0; r < tile_.tile().rows; ++r) {
      const float* d_s = tile_.d_s() + r * tile_.size().kv_rows;
      float* sums = head_ + (shape_.rows == 1 ? 0 : r * columns_);
      if (shape_.columns == 1) {
        float sum = 0;
        for (int c = 0; c < tile_.tile().columns; ++c) sum += d_s[c];
        sums[0] += sum;
      } else {
        for (int c = 0; c < tile_.tile().columns; ++c) sums[c] += d_s[c];
      }
    }
  }

  void Write() const {
    for (int r = 0; r < rows_; ++r) {
      const int64_t row = place_.row_tile * tile_.size().q_rows + r;
      const int64_t column = place_.column_tile * tile_.size().kv_rows;
      const int64_t at = BroadcastIndex(shape_, place_.batch, place_.head, row, column);
      std::copy_n(total_ + r * columns_, columns_, call_.d_bias + at);
    }
  }

  const CpuBackwardCall& call_;
  const Problem& p_;
  const BroadcastShape shape_;
  const BiasTile place_;
  BackwardTile<Products> tile_;
  float *head_, *entry_, *total_;  // [rows][columns]
  int rows_, columns_;
};

void BiasGradientItemImpl(const CpuBackwardCall& call, const BiasTile& tile, float* scratch) {
  WithProducts(*call.problem, scratch, [&](auto& products, ScratchArena& arena) {
    BiasPass(call, tile, products, arena).Run();
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(RowSumsImpl);
HWY_EXPORT(GradientItemImpl);
HWY_EXPORT(BiasGradientItemImpl);

void RowSums(const CpuBackwardCall& call, int64_t batch_index, int64_t q_head) {
  HWY_DYNAMIC_DISPATCH(RowSumsImpl)(call, batch_index, q_head);
}

void GradientItem(const CpuBackwardCall& call, const GradientRange& range, float* scratch) {
  HWY_DYNAMIC_DISPATCH(GradientItemImpl)(call, range, scratch);
}

void BiasGradientItem(const CpuBackwardCall& call, const BiasTile& tile, float* scratch) {
  HWY_DYNAMIC_DISPATCH(BiasGradientItemImpl)(call, tile, scratch);
}

}  // namespace attnd
#endif
