#include "tests/conformance/hidden_numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/tensor_view.h"
#include "tests/conformance/conformance_launch.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

constexpr int64_t kQuietRows = 64;  // a tile, from a sequence's first row on

// In every fifth column; late rows see half of these, or none.
bool IsHiddenColumn(const HiddenNumberCase& of, int64_t row, int64_t key) {
  return key % 5 == 2 && (of.is_seen_by_none || row < kQuietRows || key % 10 == 2);
}

Problem PlainHidden(ElementType element, int64_t rows, int64_t head_dim) {
  Problem p;
  p.batch = 1;
  p.q_heads = 2;
  p.kv_heads = 1;
  p.q_len = rows;
  p.kv_len = rows + 10;
  p.qk_head_dim = p.v_head_dim = head_dim;
  p.element = element;
  return p;
}

void SetCausal(Problem& p) {
  p.causal = true;
  p.alignment = Alignment::kTopLeft;
}

void SetPacked(Problem& p) {
  p.batch = 2;
  p.layout = Layout::kPackedThd;
  const auto rows = static_cast<int32_t>(p.q_len), keys = static_cast<int32_t>(p.kv_len);
  p.cu_seqlens_q = {0, rows, 2 * rows};
  p.cu_seqlens_k = {0, keys, 2 * keys};
  p.q_len *= 2;
  p.kv_len *= 2;
}

// One launch each way, with these numbers.
struct HiddenRun {
  ForwardResults forward;
  BackwardResults backward;
  EnginePrecision precision;
  bool ordered = true;
};

class HiddenChecker {
 public:
  HiddenChecker(Backend& backend, const HiddenNumberCase& of, CallMemory& memory,
                const EnginePrecision& precision)
      : backend_(backend),
        p_(of.problem),
        memory_(memory),
        precision_(precision),
        quiet_(RandomInputs(p_, 11)),
        loud_(RandomInputs(p_, 11)) {
    for (ProblemInputs* inputs : {&quiet_, &loud_}) HideColumns(of, *inputs);
    reference_.emplace(p_, TensorsOf(loud_));
    FindRows(of.is_seen_by_none ? p_.q_len : kQuietRows);
    MakeLoud(of.key, of.value);
    reference_.emplace(p_, TensorsOf(loud_));
  }

  std::vector<std::string> Run() {
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      if (!backend_.Supports(p_, direction).ok()) return {};
    }
    const std::optional<HiddenRun> quiet = RunOnce(quiet_), loud = RunOnce(loud_);
    if (quiet && loud) {
      CheckBounds(*loud);
      CheckBits(*quiet, *loud);
    }
    return std::move(failures_);
  }

 private:
  static ReferenceTensors TensorsOf(const ProblemInputs& inputs) {
    return {inputs.q.data(), inputs.k.data(), inputs.v.data(), inputs.mask_bits.as<uint8_t>(),
            inputs.bias.data()};
  }
  void HideColumns(const HiddenNumberCase& of, ProblemInputs& inputs) const {
    for (int64_t i = 0; i < p_.q_len; ++i) {
      for (int64_t j = 0; j < p_.kv_len; ++j) {
        const bool hidden = IsHiddenColumn(of, i, j);
        if (p_.bias && hidden) {
          StoreElement(p_.bias->element, inputs.bias.data(), i * p_.kv_len + j, -INFINITY);
        }
        if (!p_.bool_mask) continue;
        std::byte& byte = inputs.mask_bits.data()[i * p_.bool_mask->row_bytes() + j / 8];
        const auto bit = static_cast<std::byte>(1 << j % 8);
        byte = hidden ? byte & ~bit : byte | bit;
      }
    }
  }

  // Keys and rows by the position of their first number, and what is looked at in them.
  // Large are keys that none of the first `asked` rows sees.
  void FindRows(int64_t asked) {
    std::vector<bool> early(p_.KeyElements());
    for (int64_t b = 0; b < p_.batch; ++b) {
      const Sequence s = p_.SequenceAt(b);
      const bool is_quiet = !IsPacked(p_.layout) || b + 1 < p_.batch;
      for (int64_t h = 0; h < p_.q_heads; ++h) {
        for (int64_t i = 0; i < std::min(is_quiet ? asked : 0, s.q_len); ++i) {
          const ReferenceRow row = reference_->Row(b, h, s, i);
          for (int64_t j = 0; j < s.kv_len; ++j) {
            if (row.visible[j]) early[KeyAt(b, h, s, j)] = true;
          }
        }
      }
    }
    const int64_t entries = IsPacked(p_.layout) ? 1 : p_.batch;
    for (int64_t b = 0; b < entries; ++b) {
      for (int64_t h = 0; h < p_.kv_heads; ++h) {
        for (int64_t j = 0; j < p_.kv_len; ++j) {
          if (!early[KeyStrides(p_).Row(b, h, j)]) hidden_.push_back({b, h, j});
        }
      }
    }
    std::set<int64_t> loud;
    for (const Key& key : hidden_) loud.insert(KeyStrides(p_).Row(key.b, key.h, key.j));
    for (int64_t b = 0; b < p_.batch; ++b) {
      const Sequence s = p_.SequenceAt(b);
      for (int64_t h = 0; h < p_.q_heads; ++h) FindRowsOf(b, h, s, loud);
    }
  }
  void FindRowsOf(int64_t b, int64_t h, const Sequence& s, const std::set<int64_t>& loud) {
    for (int64_t first = 0; first < s.q_len; first += kQuietRows) {
      const int64_t end = std::min(first + kQuietRows, s.q_len);
      bool meets = false;
      std::vector<int64_t> seen;
      for (int64_t i = first; i < end; ++i) {
        const ReferenceRow row = reference_->Row(b, h, s, i);
        if (!row.any_visible) {
          empty_.push_back(OutputStrides(p_).Row(b, h, s.q_begin + i));
        }
        for (int64_t j = 0; j < s.kv_len; ++j) {
          if (!row.visible[j]) continue;
          seen.push_back(KeyAt(b, h, s, j));
          meets |= loud.count(seen.back()) > 0;
        }
      }
      if (meets) {
        met_.insert(seen.begin(), seen.end());
        continue;
      }
      for (int64_t i = first; i < end; ++i) {
        quiet_queries_.push_back(QueryStrides(p_).Row(b, h, s.q_begin + i));
        quiet_outputs_.push_back(OutputStrides(p_).Row(b, h, s.q_begin + i));
        quiet_lses_.push_back(p_.LseIndex(b, h, s, i));
      }
    }
  }
  int64_t KeyAt(int64_t b, int64_t q_head, const Sequence& s, int64_t j) const {
    return KeyStrides(p_).Row(b, p_.KvHead(q_head), s.kv_begin + j);
  }
  void MakeLoud(float key_value, float value) {
    for (const Key& key : hidden_) {
      for (int64_t d = 0; d < p_.qk_head_dim; ++d) {
        const int64_t at = KeyStrides(p_).Row(key.b, key.h, key.j) + d;
        StoreElement(p_.element, loud_.k.data(), at, (d + key.j) % 3 == 0 ? -key_value : key_value);
      }
      for (int64_t d = 0; d < p_.v_head_dim; ++d) {
        const int64_t at = ValueStrides(p_).Row(key.b, key.h, key.j) + d;
        StoreElement(p_.element, loud_.v.data(), at, (d + key.j) % 2 == 0 ? -value : value);
      }
    }
    for (int64_t row : empty_) {
      for (int64_t d = 0; d < p_.v_head_dim; ++d) {
        StoreElement(p_.element, loud_.d_o.data(), row + d, value);
      }
    }
  }

  std::optional<HiddenRun> RunOnce(const ProblemInputs& inputs) {
    auto forward = LaunchForward(backend_, memory_, {{&p_, &inputs}});
    if (!forward.ok()) return Fail(forward.status().ToString());
    LaunchItem item{&p_, &inputs};
    item.o = forward->results[0].o;
    item.lse = forward->results[0].lse;
    auto backward = LaunchBackward(backend_, memory_, {item});
    if (!backward.ok()) return Fail(backward.status().ToString());
    const bool half = forward->report.accumulate == AccumulateType::kFloat16;
    return HiddenRun{forward->results[0], backward->results[0],
                     half ? precision_.WithHalfAccumulation() : precision_,
                     backward->report.deterministic};
  }
  std::nullopt_t Fail(std::string message) {
    failures_.push_back(std::move(message));
    return std::nullopt;
  }

  void CheckBounds(const HiddenRun& run) {
    const ReferenceOutputs exact = reference_->Forward();
    const ForwardBounds bounds = BoundForward(*reference_, exact, run.precision);
    Compare("o", p_.element, run.forward.o, exact.o, bounds.o);
    Compare("lse", ElementType::kFloat32, run.forward.lse, exact.lse, bounds.lse);
    std::vector<double> d_o(p_.OutputElements());
    for (size_t n = 0; n < d_o.size(); ++n) {
      d_o[n] = LoadElement(p_.element, loud_.d_o.data(), static_cast<int64_t>(n));
    }
    const float* d_lse = loud_.d_lse.as<float>();
    const ReferenceGradients gradients = reference_->Backward(loud_.d_o.data(), d_lse, nullptr);
    const BackwardBounds of =
        BoundBackward(*reference_, exact, gradients, d_o, d_lse, run.precision);
    Compare("d_q", p_.element, run.backward.d_q, gradients.d_q, of.d_q);
    Compare("d_k", p_.element, run.backward.d_k, gradients.d_k, of.d_k);
    Compare("d_v", p_.element, run.backward.d_v, gradients.d_v, of.d_v);
  }
  void Compare(const char* tensor, ElementType element, const Bytes& got,
               const std::vector<double>& exact, const std::vector<double>& bounds) {
    int64_t wrong = 0;
    std::string first;
    double worst = 0;
    for (size_t n = 0; n < exact.size(); ++n) {
      const double value = LoadElement(element, got.data(), static_cast<int64_t>(n));
      // A number that the element type cannot hold becomes infinite.
      const bool may_overflow =
          std::fabs(exact[n]) + bounds[n] >= (element == ElementType::kFloat16 ? 65504 : 3e38);
      // Scores beyond what float32 tells apart have no bound.
      if (value == exact[n] || std::isnan(bounds[n]) || (may_overflow && !std::isfinite(value)))
        continue;
      const double ratio = std::fabs(value - exact[n]) / bounds[n];
      if (ratio <= 1) continue;
      if (wrong++ == 0) {
        first = absl::StrCat(tensor, "[", n, "] = ", value, ", exact ", exact[n], ", allowed ",
                             bounds[n]);
      }
      worst = std::max(worst, std::isnan(ratio) ? 1e300 : ratio);
    }
    if (wrong > 0) {
      Fail(absl::StrCat(first, "; ", wrong, " of ", exact.size(), " wrong, by ", worst));
    }
  }

  void CheckBits(const HiddenRun& quiet, const HiddenRun& loud) {
    const int64_t bytes = ElementBytes(p_.element);
    Same("o", quiet.forward.o, loud.forward.o, quiet_outputs_, p_.v_head_dim * bytes, bytes);
    Same("lse", quiet.forward.lse, loud.forward.lse, quiet_lses_, 4, 4);
    if (quiet.ordered && loud.ordered) {
      Same("d_q", quiet.backward.d_q, loud.backward.d_q, quiet_queries_, p_.qk_head_dim * bytes,
           bytes);
    }
    std::vector<int64_t> keys, values;
    for (int64_t b = 0; b < (IsPacked(p_.layout) ? 1 : p_.batch); ++b) {
      for (int64_t h = 0; h < p_.kv_heads; ++h) {
        for (int64_t j = 0; j < p_.kv_len; ++j) {
          const int64_t key = KeyStrides(p_).Row(b, h, j);
          if (met_.count(key) > 0) continue;
          keys.push_back(key);
          values.push_back(ValueStrides(p_).Row(b, h, j));
        }
      }
    }
    Same("d_k", quiet.backward.d_k, loud.backward.d_k, keys, p_.qk_head_dim * bytes, bytes);
    Same("d_v", quiet.backward.d_v, loud.backward.d_v, values, p_.v_head_dim * bytes, bytes);
  }
  void Same(const char* tensor, const Bytes& quiet, const Bytes& loud,
            const std::vector<int64_t>& rows, int64_t row_bytes, int64_t element_bytes) {
    int64_t others = 0;
    for (int64_t row : rows) {
      const int64_t at = row * element_bytes;
      others += std::memcmp(&quiet[at], &loud[at], row_bytes) != 0;
    }
    if (others > 0) {
      Fail(absl::StrCat(tensor, ": ", others, " of ", rows.size(),
                        " rows have other bits beside large numbers that they do not see"));
    }
  }

  struct Key {
    int64_t b, h, j;
  };
  Backend& backend_;
  const Problem& p_;
  CallMemory& memory_;
  const EnginePrecision precision_;
  ProblemInputs quiet_, loud_;
  std::optional<Reference> reference_;
  std::vector<Key> hidden_;     // the large ones
  std::vector<int64_t> empty_;  // rows that see nothing
  std::set<int64_t> met_;       // keys of tiles that see large ones
  std::vector<int64_t> quiet_queries_, quiet_outputs_, quiet_lses_;  // of tiles that do not
  std::vector<std::string> failures_;
};

}  // namespace

std::vector<HiddenNumberCase> HiddenNumberCases(ElementType element, int64_t rows,
                                                int64_t head_dim) {
  const Problem plain = PlainHidden(element, rows, head_dim);
  const bool is_half = element == ElementType::kFloat16;
  std::vector<HiddenNumberCase> cases;
  const auto add = [&](const char* name, const auto& set) {
    const float largest = is_half ? 65504 : 1e37f;
    HiddenNumberCase of = {absl::StrCat(name, "_", ElementName(element)), plain, largest, largest};
    set(of.problem);
    cases.push_back(std::move(of));
  };
  // Rows that see them have scores that float32 tells apart, and results that it holds.
  const auto add_seen = [&](const char* name, const auto& set) {
    add(name, set);
    cases.back().key = 100;
    cases.back().value = is_half ? 1e4f : 1e12f;
    cases.back().is_seen_by_none = false;
  };
  const auto bias = [](Problem& p) {
    p.bias = Bias{ElementType::kFloat32, {1, 1, p.q_len, p.kv_len}, false};
  };
  const auto bool_mask = [](Problem& p) { p.bool_mask = BoolMask{{1, 1, p.q_len, p.kv_len}}; };
  add("bias", bias);
  add("bool_mask", bool_mask);
  add("described", [](Problem& p) { SetMask(Leaf(StrideCol{5, 0, 3}), p); });
  add("kv_lengths", [&](Problem& p) {
    p.batch = 2;
    p.kv_lengths = {static_cast<int32_t>(rows) - 20, 40};
  });
  // The last quarter of the rows.
  add("empty_rows", [&](Problem& p) {
    p.window_left = 30;
    p.window_right = 2;
    p.alignment = Alignment::kOffsets;
    p.offsets = {static_cast<int32_t>(p.kv_len - 3 * rows / 4 + 30)};
  });
  add_seen("late_bias", bias);
  add_seen("late_bool_mask", bool_mask);
  add_seen("late_described", [](Problem& p) {
    SetMask(Any({Window(4, 0), All({CausalMask(), Not(Window(12, 12))})}), p);
  });
  add_seen("window", [](Problem& p) {
    p.window_left = 40;
    p.window_right = 3;
  });
  add_seen("packed", SetPacked);
  add_seen("causal", SetCausal);
  add_seen("causal_sink", [](Problem& p) {
    SetCausal(p);
    p.denominator = DenominatorKind::kSink;
    p.sink_logits = {1.5f, -2};
  });
  add_seen("causal_zero_rest", [](Problem& p) {
    SetCausal(p);
    p.denominator = DenominatorKind::kZeroRest;
  });
  add_seen("causal_dropout", [](Problem& p) {
    SetCausal(p);
    p.dropout = {50, 9, 8};
  });
  add_seen("causal_softcap", [](Problem& p) {
    SetCausal(p);
    p.softcap = 20;
  });
  add_seen("causal_atomics", [](Problem& p) {
    SetCausal(p);
    p.allow_nondeterministic = true;
  });
  if (is_half) {
    add_seen("causal_half_accumulation", [](Problem& p) {
      SetCausal(p);
      p.accumulate = AccumulateType::kFloat16;
    });
  }
  return cases;
}

std::vector<std::string> CheckHiddenNumbers(Backend& backend, const HiddenNumberCase& of,
                                            CallMemory& memory, const EnginePrecision& precision) {
  return HiddenChecker(backend, of, memory, precision).Run();
}

}  // namespace attnd
