#include "client/cli/problem_flags.h"

#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "attention/dropout.h"
#include "attention/mask_plans.h"
#include "base/status_macros.h"
#include "client/masks/mask_text.h"

namespace attnd {
namespace {

constexpr char kCausalAlone[] = "true";

struct Flag {
  const char* name;
  const char* values;  // as CLI11 shows a type; completion offers what stands in braces
  const char* help;
};

constexpr Flag kFlags[] = {
    {"layout", "{bhld,blhd,packed_thd,packed_htd}", "order of the dimensions (bhld)"},
    {"scale", "FLOAT", "factor of Q·Kᵀ (1/sqrt(head dim))"},
    {"softcap", "FLOAT", "c of c·tanh(S/c); 0: none (0)"},
    {"causal", "{top_left,bottom_right}", "where the diagonal begins; alone: see --align (none)"},
    {"align", "{top_left,bottom_right} or INT",
     "the same for a window, ALiBi and --causal alone; needed where lengths differ (none)"},
    {"window", "LEFT,RIGHT", "keys before and after; -1: unbounded (none)"},
    {"dropout", "FLOAT", "probability (0)"},
    {"dropout-seed", "UINT", "seed of dropout (0)"},
    {"dropout-offset", "UINT", "offset of dropout's generator (0)"},
    {"denominator", "{softmax,zero_rest}", "what P is divided by (softmax)"},
    {"accumulate", "{f32,f16}", "f16 where the engine has it (f32)"},
};

absl::Status Wrong(const std::string& name, absl::string_view expected, const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": expected ", expected, ", got ", got));
}

template <class Number>
absl::Status ParseInteger(const std::string& name, absl::string_view text, Number& number) {
  if (absl::SimpleAtoi(text, &number)) return absl::OkStatus();
  return Wrong(name, "an integer", std::string(text));
}

absl::Status ParseFloat(const std::string& name, const std::string& text, float& number) {
  if (absl::SimpleAtof(text, &number)) return absl::OkStatus();
  return Wrong(name, "a number", text);
}

absl::Status ParseLayout(const std::string& text, Layout& layout) {
  const std::map<std::string, Layout> kLayouts = {{"bhld", Layout::kBhld},
                                                  {"blhd", Layout::kBlhd},
                                                  {"packed_thd", Layout::kPackedThd},
                                                  {"packed_htd", Layout::kPackedHtd}};
  auto it = kLayouts.find(text);
  if (it == kLayouts.end()) return Wrong("layout", "bhld, blhd, packed_thd or packed_htd", text);
  layout = it->second;
  return absl::OkStatus();
}

// There is one diagonal: flags that repeat it are fine, flags that contradict it an error.
absl::Status SetAlignment(const std::string& name, const std::string& text, Alignment alignment,
                          std::vector<int32_t> offsets, Problem& p) {
  bool same = p.alignment == alignment && p.offsets == offsets;
  if (p.alignment != Alignment::kUnspecified && !same) {
    return Wrong(name, "the alignment that is given already, by align or the tensor offsets", text);
  }
  p.alignment = alignment;
  p.offsets = std::move(offsets);
  return absl::OkStatus();
}

absl::Status ParseAlignment(const std::string& name, const std::string& text, Problem& p) {
  if (text == "top_left") return SetAlignment(name, text, Alignment::kTopLeft, {}, p);
  if (text == "bottom_right") return SetAlignment(name, text, Alignment::kBottomRight, {}, p);
  int32_t offset;
  if (name == "causal" || !absl::SimpleAtoi(text, &offset)) {
    return Wrong(name, "top_left, bottom_right or (align) an offset", text);
  }
  return SetAlignment(name, text, Alignment::kOffsets, {offset}, p);
}

// Alone it leaves the diagonal to align and offsets. Where lengths differ, Validate requires one.
absl::Status ParseCausal(const std::string& text, Problem& p) {
  p.causal = true;
  return text == kCausalAlone ? absl::OkStatus() : ParseAlignment("causal", text, p);
}

absl::Status ParseWindow(const std::string& text, Problem& p) {
  std::vector<std::string> sides = absl::StrSplit(text, ',');
  if (sides.size() != 2) return Wrong("window", "LEFT,RIGHT", text);
  RETURN_IF_ERROR(ParseInteger("window", sides[0], p.window_left));
  return ParseInteger("window", sides[1], p.window_right);
}

absl::Status ParseDropout(const std::string& text, Problem& p) {
  float probability;
  RETURN_IF_ERROR(ParseFloat("dropout", text, probability));
  if (!(probability >= 0) || probability >= 1 || DropoutThreshold(probability) > 255) {
    return Wrong("dropout", "0 to below 511/512", text);
  }
  p.dropout.threshold = DropoutThreshold(probability);
  return absl::OkStatus();
}

absl::Status Set(const std::string& name, const std::string& text, Problem& p) {
  if (name == "layout") return ParseLayout(text, p.layout);
  if (name == "scale") return ParseFloat(name, text, p.scale.emplace());
  if (name == "softcap") return ParseFloat(name, text, p.softcap);
  if (name == "align") return ParseAlignment(name, text, p);
  if (name == "window") return ParseWindow(text, p);
  if (name == "dropout") return ParseDropout(text, p);
  if (name == "dropout-seed") return ParseInteger(name, text, p.dropout.seed);
  if (name == "dropout-offset") return ParseInteger(name, text, p.dropout.offset);
  if (name == "causal") return ParseCausal(text, p);
  if (name == "denominator") {
    if (text != "softmax" && text != "zero_rest") return Wrong(name, "softmax or zero_rest", text);
    if (text == "zero_rest") p.denominator = DenominatorKind::kZeroRest;
    return absl::OkStatus();
  }
  if (text != "f32" && text != "f16") return Wrong(name, "f32 or f16", text);
  if (text == "f16") p.accumulate = AccumulateType::kFloat16;
  return absl::OkStatus();
}

// CLI11's error for a value, after the flag's name; empty: the value is valid.
std::string Complaint(const std::string& name, const std::string& value) {
  Problem alone;
  absl::Status status = Set(name, value, alone);
  return std::string(absl::StripPrefix(status.message(), absl::StrCat(name, ": ")));
}

}  // namespace

void ProblemFlags::AddTo(CLI::App& command) {
  for (const Flag& flag : kFlags) {
    std::string name = flag.name;
    CLI::Option* option = command.add_option_function<std::string>(
        "--" + name, [this, name](const std::string& value) { values_[name] = value; }, flag.help);
    option->group("Problem")->type_name(flag.values);
    option->check([name](const std::string& value) { return Complaint(name, value); });
    if (name == "causal") option->expected(0, 1)->default_str(kCausalAlone);
  }
}

absl::Status ProblemFlags::Merge(const std::map<std::string, std::string>& metadata) {
  for (const auto& [name, value] : metadata) {
    if (name == "format") continue;  // "pt", "np", ...: what the file's writer calls itself
    bool known = false;
    for (const Flag& flag : kFlags) known |= flag.name == name;
    if (!known) return Wrong(name, "the name of a problem flag in the file's metadata", name);
    values_.emplace(name, value);  // keeps what the command line says
  }
  return absl::OkStatus();
}

absl::Status ProblemFlags::Apply(Problem& p) const {
  for (const auto& [name, text] : values_) RETURN_IF_ERROR(Set(name, text, p));
  return absl::OkStatus();
}

void SizeFlags::AddTo(CLI::App& command) {
  command.add_option("--shape", shape_, "batch, query heads, query length, head dimension")
      ->capture_default_str();
  command.add_option("--kv-heads", kv_heads_, "heads of K and V (as many as query heads)")
      ->check(CLI::PositiveNumber);
  command.add_option("--kv-len", kv_len_, "length of K and V (the query length)")
      ->check(CLI::PositiveNumber);
  command.add_option("--v-head-dim", v_head_dim_, "head dimension of V (that of Q)")
      ->check(CLI::PositiveNumber);
  command
      .add_option("--dtype", dtype_,
                  "of q, k and v (float32, or float16 where the daemon has no float32)")
      ->type_name("{float16,bfloat16,float32}");
}

absl::StatusOr<Problem> SizeFlags::MakeProblem(const ProblemFlags& options) const {
  ASSIGN_OR_RETURN(const std::vector<int64_t> shape, ParseNumbers("--shape", shape_, ','));
  if (shape.size() != 4) {
    return absl::InvalidArgumentError(absl::StrCat("--shape: expected B,H,N,D, got ", shape_));
  }
  Problem p;
  p.batch = shape[0];
  p.q_heads = shape[1];
  p.q_len = shape[2];
  p.qk_head_dim = shape[3];
  p.kv_heads = kv_heads_ == 0 ? p.q_heads : kv_heads_;
  p.kv_len = kv_len_ == 0 ? p.q_len : kv_len_;
  p.v_head_dim = v_head_dim_ == 0 ? p.qk_head_dim : v_head_dim_;
  if (!dtype_.empty()) {
    ASSIGN_OR_RETURN(p.element, ParseElement(dtype_));
  }
  RETURN_IF_ERROR(options.Apply(p));
  if (IsPacked(p.layout)) {
    for (int64_t b = 0; b <= p.batch; ++b) {
      p.cu_seqlens_q.push_back(static_cast<int32_t>(b * p.q_len));
      p.cu_seqlens_k.push_back(static_cast<int32_t>(b * p.kv_len));
    }
    p.q_len *= p.batch;
    p.kv_len *= p.batch;
  }
  RETURN_IF_ERROR(Validate(p));
  return p;
}

absl::Status ApplyMask(absl::string_view flag, const std::string& text, Problem& problem) {
  const auto named = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(flag, ": ", status.message()));
  };
  const absl::StatusOr<masks::Mask> mask = masks::ParseMask(text, problem.MaxKeyLength());
  if (!mask.ok()) return named(mask.status());
  absl::Status status = masks::SetMask(mask->Spec(), problem);
  if (status.ok()) status = Validate(problem);
  if (!status.ok()) return named(status);
  MaskPlans plans;
  const auto plan = plans.Get(problem, HostMaskOptions());
  if (!plan.ok()) return named(plan.status());
  problem.mask_share = VisitedShare(**plan, problem);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> ParseNumbers(absl::string_view flag, const std::string& text,
                                                  char separator) {
  std::vector<int64_t> numbers;
  for (absl::string_view part : absl::StrSplit(text, separator)) {
    int64_t number;
    if (!absl::SimpleAtoi(part, &number) || number < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, ": expected numbers above 0, got ", text));
    }
    numbers.push_back(number);
  }
  return numbers;
}

absl::StatusOr<ElementType> ParseElement(const std::string& name) {
  if (name == "float16" || name == "f16") return ElementType::kFloat16;
  if (name == "bfloat16" || name == "bf16") return ElementType::kBFloat16;
  if (name == "float32" || name == "f32") return ElementType::kFloat32;
  return Wrong("dtype", "float16, bfloat16 or float32", name);
}

}  // namespace attnd
