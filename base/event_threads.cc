#include "base/event_threads.h"

#include <grpc/support/cpu.h>
#include <grpcpp/version_info.h>
#include <unistd.h>

#include <algorithm>

#include "base/check.h"

static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare with this gRPC's src/cpp/common/completion_queue_cc.cc");

namespace attnd {
namespace {

thread_local unsigned cores_told = 0;  // 0: the truth

}  // namespace

EventThreads::EventThreads(int count) {
  CHECK(count == 0 || (count >= kLeast && count <= kMost)) << count;
  cores_told = static_cast<unsigned>(2 * count);  // it takes half of them
}

EventThreads::~EventThreads() { cores_told = 0; }

}  // namespace attnd

// In the place of gRPC's: a program's own symbols come before those of its libraries.
unsigned gpr_cpu_num_cores() {
  if (attnd::cores_told > 0) return attnd::cores_told;
  static const auto kCores = static_cast<unsigned>(std::max(1L, sysconf(_SC_NPROCESSORS_CONF)));
  return kCores;
}
