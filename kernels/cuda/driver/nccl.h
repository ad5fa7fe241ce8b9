// Nccl: NVIDIA's collective communications library (libnccl.so.2, found at run time), by which GPUs
// of several processes send memory to each other. It is optional. NCCL trusts whoever it connects
// to, and an id of a communicator says whom: callers that give one have to be trusted too.
//
// Communicators are made non-blocking (NCCL 2.14 and newer, "Fault Tolerance"): a call may answer
// kInProgress, and AsyncError says when it has ended, so that whoever waits can give up at a
// deadline and abort. Errors: FAILED_PRECONDITION without the library, INTERNAL with the call's
// name. Any thread; a communicator one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd {

// The oldest version whose communicators can be non-blocking: 2.14.
inline constexpr int kMinimumNcclVersion = 21400;
inline constexpr size_t kNcclIdBytes = 128;

class Nccl {
 public:
  using Communicator = struct NcclCommunicator*;  // ncclComm_t
  using Stream = void*;                           // cudaStream_t, which is CUstream

  static absl::StatusOr<std::unique_ptr<Nccl>> Load(const std::string& library);
  // The library stays open: threads of its own may still run.
  ~Nccl() = default;
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  int version() const { return version_; }  // 22304 is 2.23.4
  // For one communicator, by whose first rank's process it is made. kNcclIdBytes.
  absl::StatusOr<std::string> NewId() const;

  // ---- One communicator. All ranks call the same; each call that is under way has to end, as
  // IsDone says, before the next.
  absl::StatusOr<Communicator> Join(const std::string& id, int rank, int ranks) const;
  // Whether all calls have ended: on the host, that is; kernels are the stream's.
  absl::StatusOr<bool> IsDone(Communicator communicator) const;
  // Ends all that is under way, kernels too, and frees the communicator.
  void Abort(Communicator communicator) const { functions_.abort(communicator); }
  // Calls that stand between them run as one operation.
  absl::Status BeginGroup() const { return Check(functions_.group_start(), "ncclGroupStart"); }
  absl::Status EndGroup() const { return Check(functions_.group_end(), "ncclGroupEnd"); }
  // float32 numbers.
  absl::Status Send(Communicator communicator, Stream stream, const float* from, int64_t count,
                    int peer) const;
  absl::Status Receive(Communicator communicator, Stream stream, float* to, int64_t count,
                       int peer) const;
  // all [ranks, count] ← each rank's share [count], which may lie in its place there.
  absl::Status AllGather(Communicator communicator, Stream stream, const float* share, float* all,
                         int64_t count) const;

 private:
  using Result = int;    // ncclResult_t
  using DataType = int;  // ncclDataType_t
  struct Id {            // ncclUniqueId
    char bytes[kNcclIdBytes];
  };
  // ncclConfig_t of version 2.14. Later versions read as much of it as `size` says, and take their
  // defaults for what a config of this `version` does not have.
  struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = kMinimumNcclVersion;
    int blocking = 0;
  };
  struct Functions {
    Result (*get_version)(int*);
    const char* (*error_string)(Result);
    Result (*unique_id)(Id*);
    Result (*init_rank)(Communicator*, int ranks, Id, int rank, Config*);
    Result (*async_error)(Communicator, Result*);
    Result (*abort)(Communicator);
    Result (*group_start)();
    Result (*group_end)();
    Result (*send)(const void*, size_t count, DataType, int peer, Communicator, Stream);
    Result (*receive)(void*, size_t count, DataType, int peer, Communicator, Stream);
    Result (*all_gather)(const void*, void*, size_t count, DataType, Communicator, Stream);
  };
  Nccl() = default;
  // OK too for what is under way.
  absl::Status Check(Result result, const char* call) const;

  Functions functions_ = {};
  int version_ = 0;
};

}  // namespace attnd
