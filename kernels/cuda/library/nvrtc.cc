#include "kernels/cuda/library/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <type_traits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "kernels/tiles.h"

namespace attnd {
namespace {

constexpr const char* kUsualNames[] = {"libnvrtc.so.12", "libnvrtc.so.13"};

void* OpenFirst(const std::string& library, std::string& error) {
  std::vector<std::string> names(std::begin(kUsualNames), std::end(kUsualNames));
  if (!library.empty()) names = {library};
  for (const std::string& name : names) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    if (error.empty()) error = dlerror();
  }
  return nullptr;
}

// The number before `word` in the assembler's report ("128 registers", "16 bytes spill stores").
int NumberBefore(absl::string_view log, absl::string_view word) {
  size_t at = log.rfind(word);
  if (at == absl::string_view::npos) return 0;
  size_t begin = at;
  while (begin > 0 && log[begin - 1] == ' ') --begin;
  size_t digits = begin;
  while (digits > 0 && log[digits - 1] >= '0' && log[digits - 1] <= '9') --digits;
  int number = 0;
  return absl::SimpleAtoi(log.substr(digits, begin - digits), &number) ? number : 0;
}

// The value after "…<name>E = " in the assembly text.
template <class Number>
bool ReadFact(absl::string_view ptx, absl::string_view name, Number& value) {
  const std::string assignment = absl::StrCat(name, "E = ");
  size_t at = ptx.find(assignment);
  if (at == absl::string_view::npos) return false;
  ptx.remove_prefix(at + assignment.size());
  return absl::SimpleAtoi(ptx.substr(0, ptx.find(';')), &value);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Nvrtc>> Nvrtc::Load(const std::string& name) {
  std::string error;
  void* library = OpenFirst(name, error);
  if (library == nullptr) return absl::FailedPreconditionError("no CUDA compiler: " + error);
  auto nvrtc = std::unique_ptr<Nvrtc>(new Nvrtc());
  std::string missing;
  auto find = [&](auto& function, const char* symbol) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr && missing.empty()) missing = symbol;
  };
  Functions& f = nvrtc->functions_;
  find(f.version, "nvrtcVersion");
  find(f.architecture_count, "nvrtcGetNumSupportedArchs");
  find(f.architectures, "nvrtcGetSupportedArchs");
  find(f.error_string, "nvrtcGetErrorString");
  find(f.create, "nvrtcCreateProgram");
  find(f.destroy, "nvrtcDestroyProgram");
  find(f.compile, "nvrtcCompileProgram");
  find(f.add_name, "nvrtcAddNameExpression");
  find(f.lowered_name, "nvrtcGetLoweredName");
  find(f.log_size, "nvrtcGetProgramLogSize");
  find(f.log, "nvrtcGetProgramLog");
  find(f.cubin_size, "nvrtcGetCUBINSize");
  find(f.cubin, "nvrtcGetCUBIN");
  find(f.ptx_size, "nvrtcGetPTXSize");
  find(f.ptx, "nvrtcGetPTX");
  if (!missing.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("the CUDA compiler lacks ", missing));
  }
  int major = 0, minor = 0, count = 0;
  RETURN_IF_ERROR(nvrtc->Check(f.version(&major, &minor), "nvrtcVersion"));
  nvrtc->version_ = absl::StrCat(major, ".", minor);
  RETURN_IF_ERROR(nvrtc->Check(f.architecture_count(&count), "nvrtcGetNumSupportedArchs"));
  nvrtc->architectures_.resize(count);
  RETURN_IF_ERROR(
      nvrtc->Check(f.architectures(nvrtc->architectures_.data()), "nvrtcGetSupportedArchs"));
  return nvrtc;
}

bool Nvrtc::Targets(const std::string& target) const {
  return std::any_of(architectures_.begin(), architectures_.end(),
                     [&](int number) { return TargetOf(number) == target; });
}

absl::Status Nvrtc::Check(Result result, const char* call) const {
  if (result == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(call, ": ", functions_.error_string(result)));
}

absl::StatusOr<CompiledKernel> Nvrtc::Compile(const KernelRow& row,
                                              const std::string& target) const {
  const KernelSource source = SourceOf(row, target);
  std::vector<const char*> names, texts;
  for (const EmbeddedFile& header : DeviceHeaders()) {
    names.push_back(header.name);
    texts.push_back(header.text);
  }
  Program program = nullptr;
  RETURN_IF_ERROR(
      Check(functions_.create(&program, source.text.c_str(), NameOf(row).c_str(),
                              static_cast<int>(names.size()), texts.data(), names.data()),
            "nvrtcCreateProgram"));
  absl::StatusOr<CompiledKernel> kernel = CompileProgram(program, source, target);
  functions_.destroy(&program);
  if (kernel.ok()) return kernel;
  return absl::InternalError(
      absl::StrCat(NameOf(row), " for ", target, ": ", kernel.status().message()));
}

absl::StatusOr<CompiledKernel> Nvrtc::CompileProgram(Program program, const KernelSource& source,
                                                     const std::string& target) const {
  const Functions& f = functions_;
  // Only what a name expression asks for stays in the program.
  for (const std::string& name :
       {source.expression, absl::StrCat("&", source.space, "::", kThreadsFact),
        absl::StrCat("&", source.space, "::", kSharedFact)}) {
    RETURN_IF_ERROR(Check(f.add_name(program, name.c_str()), "nvrtcAddNameExpression"));
  }
  std::vector<std::string> options = CompilerOptions(target);
  std::vector<const char*> pointers;
  for (const std::string& option : options) pointers.push_back(option.c_str());
  const Result compiled = f.compile(program, static_cast<int>(pointers.size()), pointers.data());
  CompiledKernel kernel;
  size_t bytes = 0;
  RETURN_IF_ERROR(Check(f.log_size(program, &bytes), "nvrtcGetProgramLogSize"));
  kernel.log.resize(bytes);
  RETURN_IF_ERROR(Check(f.log(program, kernel.log.data()), "nvrtcGetProgramLog"));
  while (!kernel.log.empty() && kernel.log.back() == '\0') kernel.log.pop_back();
  if (compiled != 0) {
    return absl::InternalError(absl::StrCat(f.error_string(compiled), "\n", kernel.log));
  }
  const char* entry = nullptr;
  RETURN_IF_ERROR(
      Check(f.lowered_name(program, source.expression.c_str(), &entry), "nvrtcGetLoweredName"));
  kernel.entry = entry;
  RETURN_IF_ERROR(Check(f.cubin_size(program, &bytes), "nvrtcGetCUBINSize"));
  kernel.cubin.resize(bytes);
  RETURN_IF_ERROR(Check(f.cubin(program, kernel.cubin.data()), "nvrtcGetCUBIN"));
  RETURN_IF_ERROR(Check(f.ptx_size(program, &bytes), "nvrtcGetPTXSize"));
  std::string ptx(bytes, '\0');
  RETURN_IF_ERROR(Check(f.ptx(program, ptx.data()), "nvrtcGetPTX"));
  if (!ReadFact(ptx, kThreadsFact, kernel.threads) ||
      !ReadFact(ptx, kSharedFact, kernel.shared_bytes)) {
    return absl::InternalError("the assembly does not name the block's size");
  }
  kernel.registers = NumberBefore(kernel.log, "registers");
  kernel.spill_bytes = NumberBefore(kernel.log, "bytes spill stores");
  return kernel;
}

}  // namespace attnd
