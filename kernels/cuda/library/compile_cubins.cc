// compile_cubins: the build's kernel compiler. Compiles rows of the kernel table for the GPUs of
// one compute capability and writes a KernelArchive of packed cubins; prints registers, shared
// bytes and spills of each. It is one process on one core: Bazel runs the shards of an archive
// beside each other.
//     compile_cubins --nvrtc libnvrtc.so.12 --gpu 70 --rows sample|rest --shard 0 --shards 4
//         --out kernels_70_sample_0.cubins
//
// Exit code 1, with the compiler's log, when a row does not compile, or spills more than its table
// explains on its own target.
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_format.h"
#include "kernels/cuda/library/kernel_archive.h"
#include "kernels/cuda/library/kernel_sample.h"
#include "kernels/cuda/library/nvrtc.h"
#include "kernels/cuda/library/packed_cubin.h"
#include "kernels/tiles.h"

ABSL_FLAG(std::string, nvrtc, "", "the compiler's shared library");
ABSL_FLAG(int, gpu, 0, "compute capability, 70: 7.0");
ABSL_FLAG(std::string, rows, "sample", "\"sample\" (kernel_sample.h) or \"rest\", all others");
ABSL_FLAG(int, shard, 0, "which of --shards equal parts of these rows, from 0");
ABSL_FLAG(int, shards, 1, "number of parts");
ABSL_FLAG(std::string, out, "", "archive to write");

namespace attnd {
namespace {

std::vector<KernelRow> RowsOfShard() {
  const int gpu = absl::GetFlag(FLAGS_gpu);
  const bool is_sample = absl::GetFlag(FLAGS_rows) == "sample";
  std::vector<KernelRow> rows = KernelRowsOfGpu(gpu);
  std::erase_if(rows, [&](const KernelRow& row) { return IsSampled(row, gpu) != is_sample; });
  const size_t shard = absl::GetFlag(FLAGS_shard), shards = absl::GetFlag(FLAGS_shards);
  return std::vector<KernelRow>(rows.begin() + rows.size() * shard / shards,
                                rows.begin() + rows.size() * (shard + 1) / shards);
}

// Whether the table explains what a kernel spills; registers of other targets are not tuned for.
bool IsExplained(const KernelRow& row, const CompiledKernel& kernel) {
  const bool is_own_target =
      absl::GetFlag(FLAGS_gpu) == InfoOf(row.architecture).compute_capability;
  if (!is_own_target || kernel.spill_bytes <= row.spill_bytes) return true;
  std::cerr << NameOf(row) << ": spills " << kernel.spill_bytes << " bytes, explained are "
            << row.spill_bytes << " (kernels/tiles.cc)\n";
  return false;
}

void Print(const KernelRow& row, const CompiledKernel& kernel) {
  absl::PrintF("%-40s %3d threads %3d registers %6d shared bytes %4d spilled %7d code bytes: %s\n",
               NameOf(row), kernel.threads, kernel.registers, kernel.shared_bytes,
               kernel.spill_bytes, kernel.cubin.size(), row.reason);
}

int Main() {
  auto nvrtc = Nvrtc::Load(absl::GetFlag(FLAGS_nvrtc));
  if (!nvrtc.ok()) {
    std::cerr << nvrtc.status().message() << "\n";
    return 1;
  }
  const std::vector<KernelRow> rows = RowsOfShard();
  KernelArchive archive;
  archive.target = TargetOf(absl::GetFlag(FLAGS_gpu));
  std::vector<std::string> packed;
  packed.reserve(rows.size());  // the archive points into them
  bool ok = true;
  for (const KernelRow& row : rows) {
    auto kernel = (*nvrtc)->Compile(row, archive.target);
    if (!kernel.ok()) {
      std::cerr << kernel.status().message() << "\n";
      return 1;
    }
    Print(row, *kernel);
    ok = IsExplained(row, *kernel) && ok;
    archive.kernels.push_back({NameOf(row), kernel->entry,
                               packed.emplace_back(PackCubin(kernel->cubin)), kernel->threads,
                               kernel->shared_bytes, kernel->registers, kernel->spill_bytes});
  }
  if (!ok) return 1;
  std::ofstream file(absl::GetFlag(FLAGS_out), std::ios::binary);
  file << FormatKernelArchive(archive) << std::flush;
  return file.good() ? 0 : 1;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return attnd::Main();
}
