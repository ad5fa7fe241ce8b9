#include "base/connection_window.h"

#include <grpcpp/version_info.h>

#include <cstddef>

static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare FlowControl with this gRPC's "
              "src/core/ext/transport/chttp2/transport/flow_control.h");

namespace attnd {

// gRPC's grpc_core::chttp2::TransportFlowControl, which its packages do not install.
struct FlowControl {
  std::byte estimator[192];
  int64_t remote_window;
  int64_t target_initial_window;
  int64_t target_frame_size;
  int64_t announced_window;
  uint32_t acked_initial_window;
};

namespace {

constexpr int64_t kGrpcsWindow = 65535, kGrpcsFrame = 16384;

// As gRPC 1.51 makes it: of one that looks otherwise nothing is known.
bool IsKnown(const FlowControl& made) {
  return made.remote_window == kGrpcsWindow && made.target_initial_window == kGrpcsWindow &&
         made.target_frame_size == kGrpcsFrame && made.announced_window == kGrpcsWindow &&
         made.acked_initial_window == kGrpcsWindow;
}

}  // namespace

// The constructor, and what is called in its place (linkopts in BUILD).
void MakeFlowControl(FlowControl* made, const char* name, bool probes, void* memory) __asm__(
    "__real__ZN9grpc_core6chttp220TransportFlowControlC1EPKcbPNS_11MemoryOwnerE");
void MakeWiderFlowControl(FlowControl* made, const char* name, bool probes, void* memory) __asm__(
    "__wrap__ZN9grpc_core6chttp220TransportFlowControlC1EPKcbPNS_11MemoryOwnerE");

void MakeWiderFlowControl(FlowControl* made, const char* name, bool probes, void* memory) {
  MakeFlowControl(made, name, probes, memory);
  if (!probes && IsKnown(*made)) made->target_initial_window = kConnectionWindow;
}

}  // namespace attnd
