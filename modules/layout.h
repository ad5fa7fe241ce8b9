// ModuleLayout: what a stack of transformer layers computes, as data: distinct blocks of ops and
// the layers that run them. It is filled from the wire's ModuleLayout field by field and means
// nothing until ModuleGraph::Make has checked it.
//
// A block is a list of ops in order. Value 0 is the block's input [rows, width], value 1 the
// memory [memory rows, memory_width], a second input of every block (cross-attention), and value
// k + 2 the output of op k. An op reads values of smaller numbers, and parameters by their index in
// the block. The last op's output is the block's. Layer 0 reads x, layer i the output of layer
// i − 1, and y is the output of the last one.
//
// Values; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "attention/element.h"
#include "attention/masks/mask_spec.h"
#include "attention/problem.h"

namespace attnd {

// Limits of a layout; docs of the wire repeat them.
inline constexpr int64_t kMaxModuleBlocks = 8;
inline constexpr int64_t kMaxModuleLayers = 512;
inline constexpr int64_t kMaxBlockOps = 64;
inline constexpr int64_t kMaxBlockParameters = 64;
inline constexpr int64_t kMaxModuleWidth = 65536;
inline constexpr int64_t kModuleWidthStep = 8;  // widths are multiples of it
inline constexpr int64_t kMaxParameterDimension = int64_t{1} << 20;
inline constexpr int64_t kMaxModuleElements = int64_t{1} << 40;  // of all parameters of all layers
inline constexpr int64_t kMaxOpHeads = 1024;
inline constexpr int64_t kMaxRotaryFrequencies = 128;
inline constexpr int64_t kMaxModuleNameBytes = 128;  // of a parameter's name, a prefix, a module
inline constexpr int64_t kMaxLayoutBytes = int64_t{256} << 10;  // encoded

inline constexpr int64_t kInputValue = 0;
inline constexpr int64_t kMemoryValue = 1;
inline constexpr int64_t kFirstOpValue = 2;  // of op 0

// out = in · Wᵀ + b
struct LinearOp {
  int64_t input = 0;
  int64_t weight = 0;  // parameter [out, in], or [in, out] where transposed
  std::optional<int64_t> bias;
  bool transposed = false;
};

enum class NormKind : uint8_t {
  kLayer = 1,  // (x − mean) · rstd · (weight + offset) + bias, variance with 1/n
  kRms = 2,    // x · rsqrt(mean(x²) + epsilon) · (weight + offset)
};
struct NormOp {
  int64_t input = 0;
  NormKind kind = NormKind::kLayer;
  float epsilon = 0;
  std::optional<int64_t> weight, bias;
  float weight_offset = 0;
  bool round_before_weight = false;  // x · rstd is rounded to the element before the weight
};

// Columns [first, first + heads · dim) of a value as [rows, heads, dim].
struct HeadColumns {
  int64_t value = 0;
  int64_t first_column = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t columns() const { return heads * dim; }
};

// The first 2 · n dims of q and k turned by position · inverse_frequency[n], angles in float32.
struct Rotary {
  std::vector<float> inverse_frequency;
  float attention_factor = 1;  // multiplies cos and sin
  bool interleaved = false;    // pairs (0, 1), (2, 3), ... instead of (0, n), (1, n + 1), ...
};

struct AttentionOp {
  HeadColumns q, k, v;
  std::optional<Rotary> rotary;
  // Scale, softcap, alignment, causal, window, ALiBi, denominator and dropout.threshold count. The
  // rest is the call's (attention_problem.h).
  Problem options;
  std::optional<MaskSpec> mask;
  // Parameters [dim]: q and k are RMS-normalised over dim before rotary. Absent: not.
  std::optional<int64_t> q_norm, k_norm;
  float qk_norm_epsilon = 0;
  float qk_norm_weight_offset = 0;
  bool qk_norm_round_before_weight = false;
};

enum class ActivationKind : uint8_t {
  kRelu = 1,
  kGelu = 2,  // by erf
  kGeluTanh = 3,
  kSilu = 4,
  kQuickGelu = 5,
  kTanh = 6,
};
struct ActivationOp {
  int64_t input = 0;
  ActivationKind kind = ActivationKind::kRelu;
};

enum class BinaryKind : uint8_t {
  kAdd = 1,       // a + b_scale · b
  kMultiply = 2,  // a · b_scale · b
};
struct BinaryOp {
  BinaryKind kind = BinaryKind::kAdd;
  int64_t a = 0, b = 0;
  float b_scale = 1;
};

struct DropoutOp {
  int64_t input = 0;
  uint32_t threshold = 0;  // p · 256, 0..255
};

struct ModuleOp {
  // monostate: nothing was set, refused.
  std::variant<std::monostate, LinearOp, NormOp, AttentionOp, ActivationOp, BinaryOp, DropoutOp>
      kind;
  bool wide = false;  // the output is of ModuleLayout::wide_element
};

struct ModuleParameter {
  std::string name;
  std::vector<int64_t> shape;  // one dimension or two
};

struct ModuleBlock {
  std::vector<ModuleParameter> parameters;
  std::vector<ModuleOp> ops;
};

struct ModuleLayer {
  int64_t block = 0;
  std::string prefix;                  // before each parameter's name
  std::vector<int64_t> frozen;         // parameters that are not trained, ascending
  std::vector<float> attention_scale;  // empty, or of each attention op in place of the block's
  std::optional<int64_t> device;       // wished
};

struct ModuleLayout {
  int64_t width = 0;  // columns of x, y and of each layer's input and output
  std::vector<ModuleBlock> blocks;
  std::vector<ModuleLayer> layers;
  ElementType element = ElementType::kFloat32;       // of products' operands, values, x, y, dx, dy
  ElementType wide_element = ElementType::kFloat32;  // of outputs of wide ops
  ElementType parameter_element = ElementType::kFloat32;  // of parameters as they are kept
  int64_t memory_width = 0;                               // 0: no memory
};

}  // namespace attnd
