#include "net/process_tuning.h"

#include <malloc.h>

#include "absl/synchronization/mutex.h"

namespace attnd {
namespace {

constexpr int kArenas = 4;

}  // namespace

void TuneForTransport() {
  mallopt(M_TRIM_THRESHOLD, 2000000000);
  mallopt(M_TOP_PAD, 64 << 20);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_ARENA_MAX, kArenas);
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}

}  // namespace attnd
