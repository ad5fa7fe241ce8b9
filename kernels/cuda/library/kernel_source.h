// Makes the compiler's input for a row of the kernel table: one translation unit, the name of the
// entry in it, the headers (embedded, so that the daemon can compile without a source tree) and the
// options. The build-time tool and the run-time compiler use the same. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "kernels/tiles.h"

namespace attnd {

// A header by the name under which it is included.
struct EmbeddedFile {
  const char* name;
  const char* text;
};
const std::vector<EmbeddedFile>& DeviceHeaders();

struct KernelSource {
  std::string kernel;  // the class, as it is named in that namespace
  std::string text;
  std::string space;       // the namespace of all that it declares
  std::string expression;  // names the entry; the compiler lowers it
};
// Two ints in that namespace: threads of a block, bytes of its shared memory.
inline constexpr char kThreadsFact[] = "kernel_threads";
inline constexpr char kSharedFact[] = "kernel_shared_bytes";
// `target`: as TargetOf names it.
KernelSource SourceOf(const KernelRow& row, const std::string& target);

// Lists the compiler's options, the target's architecture among them.
std::vector<std::string> CompilerOptions(const std::string& target);

}  // namespace attnd
