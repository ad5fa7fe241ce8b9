// pack_cubins IN OUT: the archive that compile_cubins wrote, each cubin packed (packed_cubin.h).
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "base/read_file.h"
#include "kernels/cuda/library/kernel_archive.h"
#include "kernels/cuda/library/packed_cubin.h"

namespace attnd {
namespace {

int Pack(const char* in, const char* out) {
  const std::string bytes = ReadFile(in);
  auto archive = ParseKernelArchive(bytes);
  if (!archive.ok()) {
    std::cerr << in << ": " << archive.status().message() << "\n";
    return 1;
  }
  std::vector<std::string> packed;
  packed.reserve(archive->kernels.size());  // the archive points into them
  for (ArchivedKernel& kernel : archive->kernels) {
    kernel.cubin = packed.emplace_back(PackCubin(kernel.cubin));
  }
  std::ofstream file(out, std::ios::binary);
  file << FormatKernelArchive(*archive);
  return file.good() ? 0 : 1;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  if (argc == 3) return attnd::Pack(argv[1], argv[2]);
  std::cerr << "usage: pack_cubins IN OUT\n";
  return 2;
}
