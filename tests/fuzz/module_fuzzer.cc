#include "tests/fuzz/module_fuzzer.h"

#include <google/protobuf/message.h>
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/layers/cpu/cpu_module_engine.h"
#include "modules/check_rows.h"
#include "modules/graph.h"
#include "modules/module_engine.h"
#include "proto/attnd/v1/module.pb.h"
#include "proto/attnd/v1/module_codec.h"
#include "proto/attnd/v1/rows_codec.h"
#include "tests/fuzz/choices.h"
#include "tests/layers/random_module.h"

namespace attnd {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr int64_t kMostBytes = int64_t{4} << 20;  // of a module that is run
constexpr int64_t kMostRows = 64;

// Changes fields of a message without a thought for what they mean.
class Spoiler {
 public:
  explicit Spoiler(Choices& choices) : choices_(choices) {}

  void Spoil(Message& message) {
    const auto* type = message.GetDescriptor();
    if (type->field_count() == 0) return;
    const FieldDescriptor& field =
        *type->field(static_cast<int>(choices_.Between(0, type->field_count() - 1)));
    const Reflection& of = *message.GetReflection();
    if (field.is_repeated()) return SpoilRepeated(message, of, field);
    if (choices_.Between(0, 15) == 0) return of.ClearField(&message, &field);
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      return Spoil(*of.MutableMessage(&message, &field));
    }
    Set(message, of, field);
  }

 private:
  void SpoilRepeated(Message& message, const Reflection& of, const FieldDescriptor& field) {
    const int size = of.FieldSize(message, &field);
    const int64_t how = choices_.Between(0, 7);
    if (how == 0 && size > 0) return of.RemoveLast(&message, &field);
    const bool is_message = field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (how == 3 && size > 0) return Lengthen(message, of, field);
    if (!is_message)
      return how < 4 || size == 0 ? Add(message, of, field) : Swap(message, of, field);
    if (size == 0 || how == 1) return Spoil(*of.AddMessage(&message, &field));
    if (how == 2) return Swap(message, of, field);
    Spoil(*of.MutableRepeatedMessage(&message, &field,
                                     static_cast<int>(choices_.Between(0, size - 1))));
  }
  // The last entry again and again, to the list's limit and beyond, or some.
  void Lengthen(Message& message, const Reflection& of, const FieldDescriptor& field) {
    constexpr int64_t kLengths[] = {2, 8, 64, 65, 512, 513};
    const int64_t length = kLengths[choices_.Between(0, 5)];
    for (int size = of.FieldSize(message, &field); size < length; ++size) {
      if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        Message& added = *of.AddMessage(&message, &field);
        added.CopyFrom(of.GetRepeatedMessage(message, &field, size - 1));
      } else {
        Add(message, of, field);
      }
    }
  }
  void Swap(Message& message, const Reflection& of, const FieldDescriptor& field) {
    const int last = of.FieldSize(message, &field) - 1;
    of.SwapElements(&message, &field, static_cast<int>(choices_.Between(0, last)),
                    static_cast<int>(choices_.Between(0, last)));
  }

  int64_t Number() {
    constexpr int64_t kOdd[] = {-1, 0, 1, 8, INT32_MAX, INT32_MIN, UINT32_MAX, int64_t{1} << 40};
    const int64_t which = choices_.Between(0, 15);
    return which < 8 ? kOdd[which] : choices_.Between(0, 300);
  }
  double Real() {
    constexpr double kOdd[] = {0,
                               -1,
                               1e-30,
                               1e30,
                               std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()};
    const int64_t which = choices_.Between(0, 11);
    return which < 6 ? kOdd[which] : static_cast<double>(choices_.Between(-1000, 1000)) / 500;
  }
  std::string Text() { return std::string(static_cast<size_t>(choices_.Between(0, 200)), 'n'); }

  void Set(Message& message, const Reflection& of, const FieldDescriptor& field) {
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return of.SetInt32(&message, &field, static_cast<int32_t>(Number()));
      case FieldDescriptor::CPPTYPE_UINT32:
        return of.SetUInt32(&message, &field, static_cast<uint32_t>(Number()));
      case FieldDescriptor::CPPTYPE_INT64:
        return of.SetInt64(&message, &field, Number());
      case FieldDescriptor::CPPTYPE_UINT64:
        return of.SetUInt64(&message, &field, static_cast<uint64_t>(Number()));
      case FieldDescriptor::CPPTYPE_FLOAT:
        return of.SetFloat(&message, &field, static_cast<float>(Real()));
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return of.SetDouble(&message, &field, Real());
      case FieldDescriptor::CPPTYPE_BOOL:
        return of.SetBool(&message, &field, choices_.Between(0, 1) != 0);
      case FieldDescriptor::CPPTYPE_ENUM:
        return of.SetEnumValue(&message, &field, static_cast<int>(choices_.Between(0, 9)));
      default:
        return of.SetString(&message, &field, Text());
    }
  }
  void Add(Message& message, const Reflection& of, const FieldDescriptor& field) {
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return of.AddInt32(&message, &field, static_cast<int32_t>(Number()));
      case FieldDescriptor::CPPTYPE_UINT32:
        return of.AddUInt32(&message, &field, static_cast<uint32_t>(Number()));
      case FieldDescriptor::CPPTYPE_UINT64:
        return of.AddUInt64(&message, &field, static_cast<uint64_t>(Number()));
      case FieldDescriptor::CPPTYPE_FLOAT:
        return of.AddFloat(&message, &field, static_cast<float>(Real()));
      default:
        return;
    }
  }

  Choices& choices_;
};

// Checks what a caller is told: a code of its own mistakes and, where those are of a field, its
// name.
absl::Status Refused(const absl::Status& status) {
  CHECK(status.code() == absl::StatusCode::kInvalidArgument ||
        status.code() == absl::StatusCode::kOutOfRange ||
        status.code() == absl::StatusCode::kUnimplemented)
      << status;
  CHECK(status.message().find(": expected ") != std::string::npos ||
        status.code() == absl::StatusCode::kUnimplemented)
      << status;
  return status;
}

struct Case {
  std::shared_ptr<const ModuleDescription> module;
  ModuleLimits limits;
  EnginePlan plan;
};

absl::StatusOr<Case> Check(const v1::RegisterModuleRequest& request, const ModuleEngine& engine) {
  auto layout = DecodeModuleLayout(request.layout());
  if (!layout.ok()) return Refused(layout.status());
  auto graph = ModuleGraph::Make(*std::move(layout));
  if (!graph.ok()) return Refused(graph.status());
  auto optimizer = DecodeOptimizer(request.optimizer());
  if (!optimizer.ok()) return Refused(optimizer.status());
  auto module = std::make_shared<const ModuleDescription>(*std::move(graph), *std::move(optimizer));
  absl::Status status = CheckOptimizer(module->optimizer, module->graph, module->table);
  if (!status.ok()) return Refused(status);
  auto limits = DecodeModuleLimits(request.limits());
  if (!limits.ok()) return Refused(limits.status());
  if (status = engine.Supports(module->graph); !status.ok()) return Refused(status);
  auto plan = engine.Plan(*module, *limits, kMostBytes);
  if (!plan.ok()) return Refused(plan.status());
  return Case{std::move(module), *limits, *plan};
}

v1::RegisterModuleRequest RequestOf(Choices& choices) {
  uint64_t seed = 0;
  for (int n = 0; n < 4; ++n) seed = seed << 8 | choices.Byte();
  Random random(seed);
  constexpr ElementType kElements[] = {ElementType::kFloat32, ElementType::kBFloat16,
                                       ElementType::kFloat16};
  v1::RegisterModuleRequest request;
  const ModuleLayout layout = RandomLayout(random, {.element = kElements[choices.Between(0, 2)]});
  *request.mutable_layout() = EncodeModuleLayout(layout);
  const bool has_memory = layout.memory_width > 0;
  request.mutable_limits()->set_max_rows(kMostRows);
  request.mutable_limits()->set_kept_rows(choices.Between(0, 3) == 0 ? 0 : 2 * kMostRows);
  request.mutable_limits()->set_max_memory_rows(has_memory ? kMostRows : 0);
  request.mutable_limits()->set_kept_memory_rows(has_memory ? 2 * kMostRows : 0);
  if (choices.Between(0, 1) == 0) {
    request.mutable_optimizer()->mutable_sgd()->set_momentum(0.9);
  } else {
    request.mutable_optimizer()->mutable_adamw()->set_beta1(0.9);
    request.mutable_optimizer()->mutable_adamw()->set_beta2(0.99);
    request.mutable_optimizer()->mutable_adamw()->set_epsilon(1e-8);
  }
  Spoiler spoiler(choices);
  for (int64_t times = choices.Between(0, 3); times > 0; --times) {
    spoiler.Spoil(choices.Between(0, 3) > 0 ? static_cast<Message&>(*request.mutable_layout())
                                            : request);
  }
  return request;
}

absl::StatusOr<CallRows> RowsOf(Choices& choices, const Case& of) {
  v1::Rows wire;
  const int64_t batch = choices.Between(1, 3), length = choices.Between(1, 8);
  wire.set_batch(static_cast<uint32_t>(batch));
  const bool is_packed = choices.Between(0, 3) == 0;
  const bool has_memory = of.module->graph.layout().memory_width > 0;
  if (!is_packed) {
    wire.set_length(static_cast<uint32_t>(length));
    if (has_memory) wire.set_memory_length(static_cast<uint32_t>(length + 1));
  } else {
    for (int64_t n = 0; n <= batch; ++n) {
      wire.mutable_lengths()->add_cu_seqlens_q(static_cast<uint32_t>(n * length));
      if (has_memory) {
        wire.mutable_memory_lengths()->add_cu_seqlens_k(static_cast<uint32_t>(n * length));
      }
    }
  }
  if (choices.Between(0, 1) == 0) Spoiler(choices).Spoil(wire);
  auto rows = DecodeRows(wire);
  if (!rows.ok()) return Refused(rows.status());
  const absl::Status status = CheckRows(of.module->graph, *rows);
  if (!status.ok()) return Refused(status);
  if (rows->rows() > of.limits.max_rows || rows->memory_rows() > of.limits.max_memory_rows) {
    return absl::OutOfRangeError("rows");
  }
  return rows;
}

using Bytes = std::vector<std::byte>;

Bytes RandomBytes(Choices& choices, int64_t count, ElementType element) {
  Bytes bytes(static_cast<size_t>(count * ElementBytes(element)));
  for (int64_t n = 0; n < count; ++n) {
    StoreElement(element, bytes.data(), n, static_cast<float>(choices.Between(-100, 100)) / 64);
  }
  return bytes;
}

// Checks what the engine says of rows that fit: it may refuse masks that a call does not.
bool Ran(const absl::Status& status) {
  if (!status.ok()) {
    CHECK(status.code() != absl::StatusCode::kInternal &&
          status.code() != absl::StatusCode::kUnknown)
        << status;
  }
  return status.ok();
}

bool Train(ModuleInstance& instance, Choices& choices, const Case& of, const CallRows& rows) {
  const ModuleLayout& layout = of.module->graph.layout();
  const Bytes x = RandomBytes(choices, rows.rows() * layout.width, layout.element);
  const Bytes memory =
      RandomBytes(choices, rows.memory_rows() * layout.memory_width, layout.element);
  std::vector<uint8_t> mask(
      static_cast<size_t>(rows.bool_mask.has_value() ? rows.bool_mask->bytes() : 0), 0xff);
  Bytes y(x.size()), dx(x.size()), d_memory(memory.size());
  const bool keeps = of.limits.kept_rows > 0 && choices.Between(0, 3) > 0;
  auto kept = instance.Forward({.rows = &rows,
                                .dropout = {true, choices.Byte(), 1},
                                .x = x,
                                .memory = memory,
                                .mask_bits = mask,
                                .keep = keeps,
                                .y = absl::MakeSpan(y)});
  if (!Ran(kept.status())) return false;
  if (!keeps) return true;
  if (!Ran(instance.Backward({.activation = *kept,
                              .dy = y,
                              .dx = absl::MakeSpan(dx),
                              .d_memory = absl::MakeSpan(d_memory)}))) {
    return false;
  }
  if (choices.Between(0, 3) > 0) instance.DropActivation(*kept);
  if (of.module->optimizer.kind == OptimizerKind::kNone) return true;
  const std::vector<GroupRates> rates(64, {.learning_rate = 1e-3, .weight_decay = 0.1});
  return Ran(instance.Step({.groups = rates, .skip_unless_finite = true}).status());
}

double ThreadSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

int64_t HeapBytes() {
  const struct mallinfo2 heap = mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
}

// One for the process, as a server has.
ModuleEngine& Engine() {
  static const auto& backend = *new std::unique_ptr<Backend>(MakeCpuBackend({.threads = 1}));
  static const auto& engine = *new std::unique_ptr<ModuleEngine>(MakeCpuModuleEngine(1, *backend));
  return *engine;
}

}  // namespace

FuzzedModule FuzzModule(const uint8_t* data, size_t size) {
  Choices choices(data, size);
  ModuleEngine& engine = Engine();
  const v1::RegisterModuleRequest request = RequestOf(choices);
  FuzzedModule result;
  const int64_t before = HeapBytes();
  const double begun = ThreadSeconds();
  absl::StatusOr<Case> checked = Check(request, engine);
  result.check_seconds = ThreadSeconds() - begun;
  result.check_bytes = HeapBytes() - before;
  if (!checked.ok()) return result;
  auto instance = engine.Make(checked->module, checked->limits, checked->plan);
  CHECK(instance.ok()) << instance.status();
  const auto& entries = checked->module->table.entries();
  for (size_t n = 0; n < entries.size(); ++n) {
    const Bytes bytes = RandomBytes(choices, entries[n].elements, ElementType::kFloat32);
    const absl::Status put = (*instance)->Put(static_cast<int64_t>(n), TensorRole::kWeight,
                                              ElementType::kFloat32, bytes);
    CHECK(put.ok()) << put;
  }
  for (int64_t calls = choices.Between(1, 3); calls > 0; --calls) {
    absl::StatusOr<CallRows> rows = RowsOf(choices, *checked);
    if (rows.ok()) result.was_run |= Train(**instance, choices, *checked, *rows);
  }
  return result;
}

}  // namespace attnd
