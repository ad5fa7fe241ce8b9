#include "server/shared_memory/shared_region.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

#ifndef F_SEAL_FUTURE_WRITE  // Linux 5.1
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace attnd {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kBlockBytes = 512;  // unit of st_blocks

template <class Got>
absl::Status Wrong(absl::string_view expected, const Got& got) {
  return absl::FailedPreconditionError(absl::StrCat("memfd: expected ", expected, ", got ", got));
}

// Before it is mapped: what kind of file it is, and that it cannot shrink under us. Files of an
// ordinary tmpfs and of other file systems have no seals to check; huge pages can be missing at the
// time of a page fault.
absl::Status CheckFile(int fd, int64_t size) {
  struct statfs system;
  if (fstatfs(fd, &system) != 0) return Wrong("a memfd", strerror(errno));
  if (system.f_type != TMPFS_MAGIC) return Wrong("a memfd of ordinary pages", "another file");
  struct stat file;
  if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode)) return Wrong("a memfd", "another file");
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) return Wrong("a memfd", "a file without seals");
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  if ((seals & kNeeded) != kNeeded) return Wrong("the seals SHRINK and GROW", seals);
  if ((seals & F_SEAL_SEAL) != 0) return Wrong("no seal SEAL", seals);
  if (size % kPageBytes != 0) return Wrong("a size of whole pages of 4096 bytes", size);
  if (file.st_size != size) return Wrong(absl::StrCat(size, " bytes, as declared"), file.st_size);
  return absl::OkStatus();
}

// Once mapped: no hole can be punched any more (that is what FUTURE_WRITE forbids beside new
// writable mappings), and there is none, so a page fault here never has to find memory.
absl::Status SealPages(int fd, int64_t size) {
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    return Wrong("a memfd that takes the seal FUTURE_WRITE", strerror(errno));
  }
  struct stat file;
  if (fstat(fd, &file) != 0) return Wrong("a memfd", strerror(errno));
  int64_t allocated = int64_t{file.st_blocks} * kBlockBytes;
  if (allocated >= size) return absl::OkStatus();
  return Wrong(absl::StrCat(size, " allocated bytes"), allocated);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedRegion>> SharedRegion::Map(int fd, int64_t size) {
  RETURN_IF_ERROR(CheckFile(fd, size));
  void* data = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return Wrong("memory that can be mapped and written", strerror(errno));
  std::unique_ptr<SharedRegion> region(new SharedRegion(static_cast<std::byte*>(data), size));
  RETURN_IF_ERROR(SealPages(fd, size));
  // Advice only: the first call shall not fault page by page, a core dump not hold tensors.
  madvise(data, static_cast<size_t>(size), MADV_POPULATE_WRITE);
  madvise(data, static_cast<size_t>(size), MADV_DONTDUMP);
  return region;
}

SharedRegion::~SharedRegion() { munmap(data_, static_cast<size_t>(size_)); }

}  // namespace attnd
