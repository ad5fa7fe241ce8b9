// write_emulated_kernels: writes the sources that give the emulator its kernels. Each row's class
// is the one that kernel_source.h names for the GPU's compiler, so that both run the same code.
//     write_emulated_kernels sm70 OUT.cc...
//
// The rows (emulated_rows.h) are cut into as many equal parts as there are files.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/cuda/library/kernel_source.h"
#include "tests/emulator/kernels/emulated_rows.h"

namespace attnd {
namespace {

std::string EmulatedSource(const std::string& architecture, absl::Span<const KernelRow> rows) {
  std::string text = absl::StrCat("#include \"kernels/", architecture, "/kernels.h\"\n",
                                  "#include \"tests/emulator/kernels/find_emulated_kernel.h\"\n",
                                  "namespace attnd::", architecture, " {\nnamespace {\n",
                                  "const bool kAdded = AddEmulatedKernels({\n");
  for (const KernelRow& row : rows) {
    absl::StrAppend(&text, "    {\"", EmulatedName(row), "\", EmulatedEntry<",
                    SourceOf(row, "sm_70").kernel, ">()},\n");
  }
  return text + "});\n}\n}\n";
}

int WriteSources(const std::string& architecture, absl::Span<const std::string> paths) {
  const auto info = std::find_if(Architectures().begin(), Architectures().end(),
                                 [&](const auto& each) { return each.name == architecture; });
  if (info == Architectures().end()) return 2;
  const std::vector<KernelRow> rows = EmulatedRows(info->architecture);
  for (size_t n = 0; n < paths.size(); ++n) {
    const size_t begin = rows.size() * n / paths.size();
    const size_t end = rows.size() * (n + 1) / paths.size();
    std::ofstream file(paths[n]);
    file << EmulatedSource(architecture, absl::MakeSpan(rows).subspan(begin, end - begin))
         << std::flush;
    if (!file.good()) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() < 2) {
    std::cerr << "usage: write_emulated_kernels sm70 OUT.cc...\n";
    return 2;
  }
  return attnd::WriteSources(arguments[0], absl::MakeSpan(arguments).subspan(1));
}
