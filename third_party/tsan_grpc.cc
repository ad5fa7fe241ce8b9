// ThreadSanitizer needs to know about gRPC's core, whose completion queues hand an operation
// from the thread that starts it to the thread that takes its event by atomics of their own:
// without this all that a reactor's callbacks share looks like a race. What a thread did before it
// gave gRPC an operation happens before whatever a thread does after it has taken an event. This is
// more than gRPC promises (the event may be of another operation), so some races stay hidden. Each
// function stands in front of the library's own, as in tsan_absl.cc. Empty without
// -fsanitize=thread.
#if defined(__SANITIZE_THREAD__)
#include <dlfcn.h>
#include <grpc/grpc.h>
#include <sanitizer/tsan_interface.h>

namespace {

char handover;  // its address stands for every queue

template <class Function>
Function* FindInLibrary(const char* name, Function*) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* operations,
                                                 size_t count, void* tag, void* reserved) {
  static auto* const kLibrary = FindInLibrary("grpc_call_start_batch", &grpc_call_start_batch);
  __tsan_release(&handover);
  return kLibrary(call, operations, count, tag, reserved);
}

extern "C" grpc_event grpc_completion_queue_next(grpc_completion_queue* queue,
                                                 gpr_timespec deadline, void* reserved) {
  static auto* const kLibrary =
      FindInLibrary("grpc_completion_queue_next", &grpc_completion_queue_next);
  const grpc_event event = kLibrary(queue, deadline, reserved);
  __tsan_acquire(&handover);
  return event;
}

#endif
