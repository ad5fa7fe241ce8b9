#include "tests/emulator/kernels/emulated_rows.h"

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

// One width for each form of tiles: float16's narrow and wide one, and of bfloat16, which differs
// in its instructions for products alone, the wide one, which takes every call.
bool HasSm80(const KernelRow& row) {
  switch (row.element) {
    case ElementType::kFloat16:
      return row.head_dim == 64 || (row.head_dim == 256 && !row.small);
    case ElementType::kBFloat16:
      return row.head_dim == 256 && !row.small;
    case ElementType::kFloat32:
      return true;
  }
  return false;
}

// One width for each element: float16 has the narrow form of tiles, bfloat16 the wide one. Dropout
// is decided ahead for both.
bool HasSm90(const KernelRow& row) {
  if (row.kind == KernelKind::kForwardDropoutBits) return true;
  return row.head_dim == (row.element == ElementType::kFloat16 ? 64 : 128);
}

bool Has(const KernelRow& row) {
  if (row.head_dim == 0) return true;
  switch (row.architecture) {
    case Architecture::kSm70:
      // All widths: without those of 32 the emulator's tests take longer than these compile, since
      // most calls in tests are narrow.
      return true;
    case Architecture::kSm80:
      return HasSm80(row);
    case Architecture::kSm90:
      return HasSm90(row);
  }
  return false;
}

}  // namespace

std::vector<KernelRow> EmulatedRows(Architecture architecture) {
  std::vector<KernelRow> rows = KernelRowsOf(architecture);
  std::erase_if(rows, [](const KernelRow& row) { return !Has(row); });
  return rows;
}

std::string EmulatedName(const KernelRow& row) {
  return absl::StrCat(InfoOf(row.architecture).name, " ", NameOf(row));
}

}  // namespace attnd
