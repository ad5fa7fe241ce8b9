// join_cubins GPU OUT [IN...] joins the archives that compile_cubins wrote for GPUs of compute
// capability GPU (70); without any, it writes an archive without kernels.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "base/read_file.h"
#include "kernels/cuda/library/kernel_archive.h"
#include "kernels/tiles.h"

namespace attnd {
namespace {

int Join(const std::string& target, const char* out, const std::vector<std::string>& inputs) {
  KernelArchive all;
  all.target = target;
  std::vector<std::string> bytes;
  bytes.reserve(inputs.size());  // the archive points into them
  for (const std::string& in : inputs) {
    auto archive = ParseKernelArchive(bytes.emplace_back(ReadFile(in)));
    if (!archive.ok() || archive->target != target) {
      std::cerr << in << ": "
                << (archive.ok() ? "for " + archive->target
                                 : std::string(archive.status().message()))
                << "\n";
      return 1;
    }
    all.kernels.insert(all.kernels.end(), archive->kernels.begin(), archive->kernels.end());
  }
  std::ofstream file(out, std::ios::binary);
  file << FormatKernelArchive(all) << std::flush;
  return file.good() ? 0 : 1;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  if (argc >= 3) {
    return attnd::Join(attnd::TargetOf(std::atoi(argv[1])), argv[2], {argv + 3, argv + argc});
  }
  std::cerr << "usage: join_cubins GPU OUT [IN...]\n";
  return 2;
}
