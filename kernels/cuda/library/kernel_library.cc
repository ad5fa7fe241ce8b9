#include "kernels/cuda/library/kernel_library.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "kernels/cuda/library/kernel_source.h"
#include "kernels/cuda/library/packed_cubin.h"

namespace attnd {
namespace {

// 70 of "sm_70"; 0 for what no GPU is called.
int NumberOf(absl::string_view target) {
  int number = 0;
  absl::ConsumeSuffix(&target, "a");
  return absl::ConsumePrefix(&target, "sm_") && absl::SimpleAtoi(target, &number) ? number : 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelLibrary>> KernelLibrary::Create(
    const Driver& driver, int major, int minor, const std::vector<absl::string_view>& archives,
    const Options& options) {
  const int own = major * 10 + minor;
  auto library = std::unique_ptr<KernelLibrary>(new KernelLibrary(driver, TargetOf(own), options));
  for (absl::string_view bytes : archives) {
    ASSIGN_OR_RETURN(KernelArchive archive, ParseKernelArchive(bytes));
    const int number = NumberOf(archive.target);
    const bool runs_here = number / 10 == major && number <= own;
    if (runs_here && number > NumberOf(library->shipped_.target)) {
      library->shipped_ = std::move(archive);
    }
  }
  auto compiler = Nvrtc::Load(options.compiler);
  if (!compiler.ok()) {
    library->why_no_compiler_ = std::string(compiler.status().message());
  } else if (!(*compiler)->Targets(library->target_)) {
    library->why_no_compiler_ =
        absl::StrCat("CUDA ", (*compiler)->version(), " no longer makes code for it");
  } else {
    library->compiler_ = *std::move(compiler);
  }
  return library;
}

std::string KernelLibrary::Checksum() const {
  std::string sums;
  for (const ArchivedKernel& kernel : shipped_.kernels) {
    absl::StrAppend(&sums, kernel.name, HashText(kernel.cubin));
  }
  return HashText(sums);
}

absl::Status KernelLibrary::Check(const KernelRow& row) const {
  const ArchivedKernel* shipped = shipped_.Find(NameOf(row));
  if (shipped != nullptr) return CheckSharedMemory(*shipped);
  if (compiler_ != nullptr) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("kernel ", NameOf(row),
                                               " is not part of this build for ", target_,
                                               " and cannot be compiled here (", why_no_compiler_,
                                               "); install libnvrtc 12 or use the cpu engine"));
}

absl::Status KernelLibrary::CheckSharedMemory(const ArchivedKernel& kernel) const {
  if (kernel.shared_bytes <= shared_bytes_per_block_) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("kernel ", kernel.name, " takes ", kernel.shared_bytes,
                   " bytes of shared memory a block, this GPU has ", shared_bytes_per_block_,
                   "; use the cpu engine, or a smaller head dimension"));
}

absl::StatusOr<LoadedKernel> KernelLibrary::Get(const KernelRow& row) {
  const std::string name = NameOf(row);
  auto found = loaded_.find(name);
  if (found != loaded_.end()) return found->second;
  RETURN_IF_ERROR(Check(row));
  const ArchivedKernel* shipped = shipped_.Find(name);
  ASSIGN_OR_RETURN(LoadedKernel kernel, shipped != nullptr ? Load(*shipped) : LoadCompiled(row));
  loaded_[name] = kernel;
  return kernel;
}

absl::StatusOr<LoadedKernel> KernelLibrary::Load(const ArchivedKernel& kernel) {
  RETURN_IF_ERROR(CheckSharedMemory(kernel));
  ASSIGN_OR_RETURN(const Cubin cubin, UnpackCubin(kernel.cubin));
  ASSIGN_OR_RETURN(Module module, Module::Load(driver_, cubin.image.data()));
  ASSIGN_OR_RETURN(CUfunction function, module.Function(kernel.entry.c_str()));
  RETURN_IF_ERROR(AllowDynamicShared(driver_, function, kernel.shared_bytes));
  modules_.push_back(std::move(module));
  return LoadedKernel{function, kernel.threads, kernel.shared_bytes};
}

absl::StatusOr<LoadedKernel> KernelLibrary::LoadCompiled(const KernelRow& row) {
  const std::string key = CacheKey(row), name = NameOf(row);
  if (std::optional<std::string> bytes = cache_.Get(key); bytes.has_value()) {
    auto archive = ParseKernelArchive(*bytes);
    const ArchivedKernel* kernel = archive.ok() ? archive->Find(name) : nullptr;
    if (kernel != nullptr) {
      absl::StatusOr<LoadedKernel> loaded = Load(*kernel);
      if (!absl::IsDataLoss(loaded.status())) return loaded;  // else it is compiled anew
    }
  }
  ASSIGN_OR_RETURN(CompiledKernel compiled, compiler_->Compile(row, target_));
  ++compiled_;
  KernelArchive archive;
  archive.target = target_;
  const std::string cubin = PackCubin(compiled.cubin);
  archive.kernels.push_back({name, compiled.entry, cubin, compiled.threads, compiled.shared_bytes,
                             compiled.registers, compiled.spill_bytes});
  // A cache that cannot be written costs the next start a second, nothing else.
  cache_.Put(key, FormatKernelArchive(archive)).IgnoreError();
  return Load(archive.kernels[0]);
}

std::string KernelLibrary::CacheKey(const KernelRow& row) const {
  const KernelSource source = SourceOf(row, target_);
  std::string text = absl::StrCat(compiler_->version(), "\n", source.expression, "\n", source.text);
  for (const std::string& option : CompilerOptions(target_)) absl::StrAppend(&text, option, "\n");
  for (const EmbeddedFile& header : DeviceHeaders()) {
    absl::StrAppend(&text, header.name, "\n", header.text);
  }
  return HashText(text);
}

}  // namespace attnd
