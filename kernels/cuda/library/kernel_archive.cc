#include "kernels/cuda/library/kernel_archive.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace attnd {
namespace {

constexpr absl::string_view kHeader = "attnd kernels 1 ";

absl::Status Damaged(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("kernel archive: ", what));
}

// Takes one line off the front.
bool TakeLine(absl::string_view& rest, absl::string_view& line) {
  size_t end = rest.find('\n');
  if (end == absl::string_view::npos) return false;
  line = rest.substr(0, end);
  rest.remove_prefix(end + 1);
  return true;
}

struct Extent {
  int64_t offset = 0, bytes = 0;
};

bool ParseEntry(absl::string_view line, ArchivedKernel& kernel, Extent& extent) {
  std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
  if (words.size() != 8 || words[0].empty() || words[1].empty()) return false;
  kernel.name = std::string(words[0]);
  kernel.entry = std::string(words[1]);
  return absl::SimpleAtoi(words[2], &extent.offset) && absl::SimpleAtoi(words[3], &extent.bytes) &&
         absl::SimpleAtoi(words[4], &kernel.threads) &&
         absl::SimpleAtoi(words[5], &kernel.shared_bytes) &&
         absl::SimpleAtoi(words[6], &kernel.registers) &&
         absl::SimpleAtoi(words[7], &kernel.spill_bytes) && extent.offset >= 0 && extent.bytes > 0;
}

}  // namespace

const ArchivedKernel* KernelArchive::Find(absl::string_view name) const {
  for (const ArchivedKernel& kernel : kernels) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

absl::StatusOr<KernelArchive> ParseKernelArchive(absl::string_view bytes) {
  absl::string_view line;
  if (!TakeLine(bytes, line) || !absl::ConsumePrefix(&line, kHeader)) return Damaged("no header");
  KernelArchive archive;
  archive.target = std::string(line);
  std::vector<Extent> extents;
  for (;;) {
    if (!TakeLine(bytes, line)) return Damaged("no end of the index");
    if (line == "end") break;
    if (!ParseEntry(line, archive.kernels.emplace_back(), extents.emplace_back())) {
      return Damaged(absl::StrCat("unreadable entry: ", line.substr(0, 80)));
    }
  }
  const auto size = static_cast<int64_t>(bytes.size());
  for (size_t n = 0; n < extents.size(); ++n) {
    const Extent& extent = extents[n];
    if (extent.offset > size || extent.bytes > size - extent.offset) {
      return Damaged(absl::StrCat(archive.kernels[n].name, " lies beyond the end"));
    }
    archive.kernels[n].cubin = bytes.substr(extent.offset, extent.bytes);
  }
  return archive;
}

std::string FormatKernelArchive(const KernelArchive& archive) {
  std::string index = absl::StrCat(kHeader, archive.target, "\n"), cubins;
  for (const ArchivedKernel& kernel : archive.kernels) {
    absl::StrAppend(&index, kernel.name, " ", kernel.entry, " ", cubins.size(), " ",
                    kernel.cubin.size(), " ");
    absl::StrAppend(&index, kernel.threads, " ", kernel.shared_bytes, " ", kernel.registers, " ",
                    kernel.spill_bytes, "\n");
    absl::StrAppend(&cubins, kernel.cubin);
  }
  return absl::StrCat(index, "end\n", cubins);
}

}  // namespace attnd
