// compile_cubins: the build's kernel compiler. Compiles every shipped row of the GPUs of one
// compute capability for them and writes a KernelArchive; prints registers, shared bytes and spills
// of each.
//
//     compile_cubins --nvrtc libnvrtc.so.12 --gpu 70 --out kernels.cubins [--jobs N]
//
// Exit code 1, with the compiler's log, when a row
// does not compile, or spills more than its table explains on its own target. Rows are compiled by
// processes of their own: the compiler takes one at a time.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/read_file.h"
#include "kernels/cuda/library/kernel_archive.h"
#include "kernels/cuda/library/nvrtc.h"
#include "kernels/tiles.h"

ABSL_FLAG(std::string, nvrtc, "", "the compiler's shared library");
ABSL_FLAG(int, gpu, 0, "compute capability, 70: 7.0");
ABSL_FLAG(std::string, out, "", "archive to write");
ABSL_FLAG(int, jobs, 2, "processes at a time");

namespace attnd {
namespace {

struct Job {
  KernelRow row;
  std::string file;  // an archive of this row alone
  pid_t process = 0;
};

bool WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  return file.good();
}

// In a process of its own: the exit code.
int CompileOne(const Job& job) {
  const std::string target = TargetOf(absl::GetFlag(FLAGS_gpu));
  auto nvrtc = Nvrtc::Load(absl::GetFlag(FLAGS_nvrtc));
  if (!nvrtc.ok()) {
    std::cerr << nvrtc.status().message() << "\n";
    return 1;
  }
  auto kernel = (*nvrtc)->Compile(job.row, target);
  if (!kernel.ok()) {
    std::cerr << kernel.status().message() << "\n";
    return 1;
  }
  KernelArchive archive;
  archive.target = target;
  archive.kernels.push_back({NameOf(job.row), kernel->entry, kernel->cubin, kernel->threads,
                             kernel->shared_bytes, kernel->registers, kernel->spill_bytes});
  return WriteFile(job.file, FormatKernelArchive(archive)) ? 0 : 1;
}

bool WaitForOne(std::vector<Job>& jobs) {
  int state = 0;
  pid_t ended = wait(&state);
  for (Job& job : jobs) {
    if (job.process == ended) job.process = 0;
  }
  return ended > 0 && WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

bool CompileAll(std::vector<Job>& jobs) {
  int running = 0;
  bool ok = true;
  for (Job& job : jobs) {
    if (running == absl::GetFlag(FLAGS_jobs)) {
      ok = WaitForOne(jobs) && ok;
      --running;
    }
    if (!ok) break;
    std::fflush(nullptr);
    job.process = fork();
    if (job.process == 0) _exit(CompileOne(job));
    ++running;
  }
  for (; running > 0; --running) ok = WaitForOne(jobs) && ok;
  return ok;
}

// Whether the table explains what a kernel spills; registers of other targets are not tuned for.
bool IsExplained(const KernelRow& row, const ArchivedKernel& kernel) {
  const bool is_own_target =
      absl::GetFlag(FLAGS_gpu) == InfoOf(row.architecture).compute_capability;
  if (!is_own_target || kernel.spill_bytes <= row.spill_bytes) return true;
  std::cerr << kernel.name << ": spills " << kernel.spill_bytes << " bytes, explained are "
            << row.spill_bytes << " (kernels/tiles.cc)\n";
  return false;
}

int Main() {
  const std::string out = absl::GetFlag(FLAGS_out);
  std::vector<Job> jobs;
  for (const KernelRow& row : KernelRowsOfGpu(absl::GetFlag(FLAGS_gpu))) {
    if (!row.shipped) continue;
    jobs.push_back({row, absl::StrCat(out, ".", jobs.size()), 0});
  }
  bool ok = CompileAll(jobs);
  KernelArchive all;
  all.target = TargetOf(absl::GetFlag(FLAGS_gpu));
  std::vector<std::string> files;
  files.reserve(jobs.size());  // the archives point into them
  for (const Job& job : jobs) {
    files.push_back(ReadFile(job.file));
    std::remove(job.file.c_str());
    auto archive = ParseKernelArchive(files.back());
    if (archive.ok()) all.kernels.push_back(archive->kernels.at(0));
  }
  if (!ok || all.kernels.size() != jobs.size()) return 1;
  for (size_t n = 0; n < jobs.size(); ++n) {
    const ArchivedKernel& k = all.kernels[n];
    absl::PrintF(
        "%-40s %3d threads %3d registers %6d shared bytes %4d spilled %7d code bytes: %s\n", k.name,
        k.threads, k.registers, k.shared_bytes, k.spill_bytes, k.cubin.size(), jobs[n].row.reason);
    ok = IsExplained(jobs[n].row, k) && ok;
  }
  if (!ok) return 1;
  return WriteFile(out, FormatKernelArchive(all)) ? 0 : 1;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return attnd::Main();
}
