// Random valid Problems over the whole option set, plain ones, and random tensors for any Problem:
// for tests, `attnctl check` and benchmarks. A seed gives the same problem and the same
// bytes on every machine. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "attention/problem.h"

namespace attnd {

// Random: a small seeded generator (SplitMix64) whose draws do not depend on the standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Bits();
  int64_t Between(int64_t low, int64_t high);  // both inclusive
  bool Chance(double probability) { return Uniform() < probability; }
  double Uniform();  // [0, 1)
  double Normal();   // mean 0, deviation 1, bell-shaped, within ±3.5

 private:
  uint64_t state_;
};

// AlignedBytes: exactly `size` zeroed bytes on a 64-byte boundary. Move-only.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(int64_t size);
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  // Bit by bit, so that NaN equals itself.
  friend bool operator==(const AlignedBytes& a, const AlignedBytes& b) {
    return a.size_ == b.size_ &&
           (a.size_ == 0 || std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size_)) == 0);
  }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_.get());
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte, Free> data_;
  int64_t size_ = 0;
};

// For outputs: every element starts as NaN, so an unwritten one differs.
AlignedBytes Unwritten(int64_t size);

// Dense float32 self-attention of `length` rows and keys, without options.
Problem PlainProblem(int64_t batch, int64_t heads, int64_t length, int64_t head_dim);

struct RandomProblemLimits {
  int64_t max_pairs = 1 << 14;  // of q_heads · Σ q_len·kv_len over batch entries, masks not counted
  int64_t max_head_dim = kMaxHeadDim;
  bool masks = false;  // each with a mask by description, of any kind, instead of a bool mask
};

// A Problem that Validate accepts; every option of the contract appears among the seeds.
Problem RandomProblem(uint64_t seed, const RandomProblemLimits& limits = {});

// How values are drawn.
enum class Values {
  kNormal,          // mean 0, deviation 1
  kUniform,         // [0, 1)
  kHuge,            // q and k so large that logits reach ±6e4; the rest normal
  kLargeGradients,  // d_o and d_lse times 2^11 (float16) or 10^6, as scaled losses have; else
                    // normal
};

// Holds the inputs that both directions of a problem read, in its layout and element types.
struct ProblemInputs {
  AlignedBytes q, k, v;
  AlignedBytes mask_bits;  // empty without a bool mask; 3 of 4 keys attend, some rows have none;
                           // in wide masks whole blocks attend to all or nothing
  AlignedBytes bias;       // empty without a bias; 1 of 16 values is −infinity
  AlignedBytes d_o;
  AlignedBytes d_lse;  // float32
};
ProblemInputs RandomInputs(const Problem& problem, uint64_t seed, Values values = Values::kNormal);

}  // namespace attnd
