#include "kernels/cuda/driver/nccl.h"

#include <dlfcn.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/cuda/driver/symbols.h"

namespace attnd {
namespace {

// Values of nccl.h.
constexpr int kInProgress = 7;  // ncclInProgress
constexpr int kFloat32 = 7;     // ncclFloat32

}  // namespace

absl::StatusOr<std::unique_ptr<Nccl>> Nccl::Load(const std::string& name) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("no NCCL: ", dlerror()));
  }
  auto nccl = std::unique_ptr<Nccl>(new Nccl());
  Symbols symbols(library);
  Functions& f = nccl->functions_;
  symbols.Find(f.get_version, "ncclGetVersion");
  symbols.Find(f.error_string, "ncclGetErrorString");
  symbols.Find(f.unique_id, "ncclGetUniqueId");
  symbols.Find(f.init_rank, "ncclCommInitRankConfig");
  symbols.Find(f.async_error, "ncclCommGetAsyncError");
  symbols.Find(f.abort, "ncclCommAbort");
  symbols.Find(f.group_start, "ncclGroupStart");
  symbols.Find(f.group_end, "ncclGroupEnd");
  symbols.Find(f.send, "ncclSend");
  symbols.Find(f.receive, "ncclRecv");
  symbols.Find(f.all_gather, "ncclAllGather");
  if (!symbols.missing().empty()) {
    return absl::FailedPreconditionError(absl::StrCat(name, " lacks ", symbols.missing()));
  }
  RETURN_IF_ERROR(nccl->Check(f.get_version(&nccl->version_), "ncclGetVersion"));
  if (nccl->version_ >= kMinimumNcclVersion) return nccl;
  return absl::FailedPreconditionError(absl::StrCat(
      name, " is NCCL ", nccl->version_, ", older than ", kMinimumNcclVersion, " (2.14)"));
}

absl::Status Nccl::Check(Result result, const char* call) const {
  if (result == 0 || result == kInProgress) return absl::OkStatus();
  const char* text = functions_.error_string(result);
  return absl::InternalError(
      absl::StrCat(call, ": ncclResult ", result, text ? absl::StrCat(" (", text, ")") : ""));
}

absl::StatusOr<std::string> Nccl::NewId() const {
  Id id = {};
  RETURN_IF_ERROR(Check(functions_.unique_id(&id), "ncclGetUniqueId"));
  return std::string(id.bytes, sizeof(id.bytes));
}

absl::StatusOr<Nccl::Communicator> Nccl::Join(const std::string& id, int rank, int ranks) const {
  CHECK(id.size() == kNcclIdBytes) << id.size();
  Id unique;
  std::copy(id.begin(), id.end(), unique.bytes);
  Config config;
  Communicator made = nullptr;
  RETURN_IF_ERROR(
      Check(functions_.init_rank(&made, ranks, unique, rank, &config), "ncclCommInitRankConfig"));
  return made;
}

absl::StatusOr<bool> Nccl::IsDone(Communicator communicator) const {
  Result result = 0;
  RETURN_IF_ERROR(Check(functions_.async_error(communicator, &result), "ncclCommGetAsyncError"));
  RETURN_IF_ERROR(Check(result, "NCCL"));
  return result != kInProgress;
}

absl::Status Nccl::Send(Communicator communicator, Stream stream, const float* from, int64_t count,
                        int peer) const {
  return Check(
      functions_.send(from, static_cast<size_t>(count), kFloat32, peer, communicator, stream),
      "ncclSend");
}

absl::Status Nccl::Receive(Communicator communicator, Stream stream, float* to, int64_t count,
                           int peer) const {
  return Check(
      functions_.receive(to, static_cast<size_t>(count), kFloat32, peer, communicator, stream),
      "ncclRecv");
}

absl::Status Nccl::AllGather(Communicator communicator, Stream stream, const float* share,
                             float* all, int64_t count) const {
  return Check(
      functions_.all_gather(share, all, static_cast<size_t>(count), kFloat32, communicator, stream),
      "ncclAllGather");
}

}  // namespace attnd
