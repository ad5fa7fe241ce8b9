// The reasons of attnd's errors: each has a gRPC code, its cause, and what to do. ErrorInfo carries
// the name to the caller, attnctl prints what to do, and ./dev docs writes the tables of
// docs/ERRORS.md from this list.
#pragma once

#include "absl/strings/string_view.h"

namespace attnd {

// The names, for the code that fails with them.
namespace reason {
inline constexpr absl::string_view kBadField = "BAD_FIELD";
inline constexpr absl::string_view kBadShape = "BAD_SHAPE";
inline constexpr absl::string_view kBadDtype = "BAD_DTYPE";
inline constexpr absl::string_view kSizeMismatch = "SIZE_MISMATCH";
inline constexpr absl::string_view kUnknownField = "UNKNOWN_FIELD";
inline constexpr absl::string_view kMalformedMessage = "MALFORMED_MESSAGE";
inline constexpr absl::string_view kChunkOrder = "CHUNK_ORDER";
inline constexpr absl::string_view kMaskUnsupported = "MASK_UNSUPPORTED";
inline constexpr absl::string_view kMaskUnknown = "MASK_UNKNOWN";
inline constexpr absl::string_view kMaskTooComplex = "MASK_TOO_COMPLEX";
inline constexpr absl::string_view kMaskTooLarge = "MASK_TOO_LARGE";
inline constexpr absl::string_view kEmptyRow = "EMPTY_ROW";
inline constexpr absl::string_view kProblemUnsupported = "PROBLEM_UNSUPPORTED";
inline constexpr absl::string_view kTooLargeForDevice = "TOO_LARGE_FOR_DEVICE";
inline constexpr absl::string_view kReplyTooLarge = "REPLY_TOO_LARGE";
inline constexpr absl::string_view kQueueFull = "QUEUE_FULL";
inline constexpr absl::string_view kMemoryPressure = "MEMORY_PRESSURE";
inline constexpr absl::string_view kHbmPressure = "HBM_PRESSURE";
inline constexpr absl::string_view kDraining = "DRAINING";
inline constexpr absl::string_view kDeviceLost = "DEVICE_LOST";
inline constexpr absl::string_view kTenantQuota = "TENANT_QUOTA";
inline constexpr absl::string_view kDeadlineUnmeetable = "DEADLINE_UNMEETABLE";
inline constexpr absl::string_view kDeadlineExceededQueue = "DEADLINE_EXCEEDED_IN_QUEUE";
inline constexpr absl::string_view kDeadlineExceededKernel = "DEADLINE_EXCEEDED_IN_KERNEL";
inline constexpr absl::string_view kDeadlineExceededTransfer = "DEADLINE_EXCEEDED_IN_TRANSFER";
inline constexpr absl::string_view kStreamIdle = "STREAM_IDLE";
inline constexpr absl::string_view kStreamTooSlow = "STREAM_TOO_SLOW";
inline constexpr absl::string_view kCancelled = "CANCELLED_BY_CALLER";
inline constexpr absl::string_view kTokenMissing = "TOKEN_MISSING";
inline constexpr absl::string_view kTokenInvalid = "TOKEN_INVALID";
inline constexpr absl::string_view kLeaseLost = "LEASE_LOST";
inline constexpr absl::string_view kEpochChanged = "EPOCH_CHANGED";
inline constexpr absl::string_view kWrongReplica = "WRONG_REPLICA";
inline constexpr absl::string_view kLeaseMismatch = "LEASE_MISMATCH";
inline constexpr absl::string_view kLeaseNotOwned = "LEASE_NOT_OWNED";
inline constexpr absl::string_view kCaptureLost = "CAPTURE_LOST";
inline constexpr absl::string_view kRegionUnknown = "REGION_UNKNOWN";
inline constexpr absl::string_view kEngineFailed = "ENGINE_FAILED";
inline constexpr absl::string_view kBadLayout = "BAD_LAYOUT";
inline constexpr absl::string_view kDigestMismatch = "DIGEST_MISMATCH";
inline constexpr absl::string_view kModuleTooLarge = "MODULE_TOO_LARGE";
inline constexpr absl::string_view kModuleUnsupported = "MODULE_UNSUPPORTED";
inline constexpr absl::string_view kModuleQuota = "MODULE_QUOTA";
inline constexpr absl::string_view kModuleExists = "MODULE_EXISTS";
inline constexpr absl::string_view kModuleTaken = "MODULE_TAKEN";
inline constexpr absl::string_view kModuleLost = "MODULE_LOST";
inline constexpr absl::string_view kModuleNotOwned = "MODULE_NOT_OWNED";
inline constexpr absl::string_view kWeightsIncomplete = "WEIGHTS_INCOMPLETE";
inline constexpr absl::string_view kSequenceMismatch = "SEQUENCE_MISMATCH";
inline constexpr absl::string_view kStepConflict = "STEP_CONFLICT";
inline constexpr absl::string_view kStepOutOfOrder = "STEP_OUT_OF_ORDER";
inline constexpr absl::string_view kGradientIncomplete = "GRADIENT_INCOMPLETE";
inline constexpr absl::string_view kMicroBatchConflict = "MICRO_BATCH_CONFLICT";
inline constexpr absl::string_view kMicroBatchEarly = "MICRO_BATCH_EARLY";
inline constexpr absl::string_view kSumFailed = "SUM_FAILED";
inline constexpr absl::string_view kStateUnavailable = "STATE_UNAVAILABLE";
inline constexpr absl::string_view kActivationPressure = "ACTIVATION_PRESSURE";
}  // namespace reason

struct ErrorReason {
  absl::string_view code;   // of gRPC
  absl::string_view name;   // of the constants above
  absl::string_view cause;  // a sentence or two, in Markdown
  absl::string_view cure;   // what to do, in Markdown
};

inline constexpr ErrorReason kErrorReasons[] = {
    {"INVALID_ARGUMENT", reason::kBadShape,
     "A size, list or shape is out of range, or two disagree.",
     "Correct the field that the message names; a retry fails again."},
    {"INVALID_ARGUMENT", reason::kBadDtype, "An element type is unknown or missing.",
     "Correct the field that the message names."},
    {"INVALID_ARGUMENT", reason::kBadField,
     "Another field is out of range, or two fields exclude each other.",
     "Correct the field that the message names."},
    {"INVALID_ARGUMENT", reason::kSizeMismatch,
     "A payload has another size than `problem` implies.",
     "Send the bytes that the message expects."},
    {"INVALID_ARGUMENT", reason::kUnknownField,
     "The server does not know a field, and ignoring it could change the result. GetServerInfo "
     "alone ignores unknown fields.",
     "Use a client of the server's version, which `attnctl info` prints."},
    {"INVALID_ARGUMENT", reason::kMalformedMessage,
     "The message has truncated bytes, a wrong wire type, or a field or oneof twice.",
     "Correct the encoder."},
    {"INVALID_ARGUMENT", reason::kChunkOrder,
     "A stream sent a chunk before its header, a second header, a gap, an overlap, a byte too "
     "many, a payload out of turn, or ended before its last byte.",
     "Correct the sender; attention.proto states the order."},
    {"OUT_OF_RANGE", reason::kTooLargeForDevice,
     "Inputs, workspace, outputs and mask tiles exceed `--memory_limit_mib`, "
     "`--caller_memory_mib` or the GPU's memory, even on an idle server. Metadata `limit` names "
     "which.",
     "Split the call by batch or heads, or raise the limit."},
    {"OUT_OF_RANGE", reason::kReplyTooLarge, "The reply would exceed `--max_message_mib`.",
     "Split the call by batch or heads."},
    {"UNIMPLEMENTED", reason::kMaskUnsupported,
     "The cuda engine cannot number so many different partial tiles (`problem.mask`). The CPU "
     "engine has no such limit.",
     "Use coarser blocks, or another replica."},
    {"INVALID_ARGUMENT", reason::kEmptyRow,
     "The mask rejects rows that see no key, and one sees none; the message names it.",
     "Correct the mask, or ask for zeros (EMPTY_ROW_ZERO)."},
    {"OUT_OF_RANGE", reason::kMaskTooLarge,
     "The lists that the mask names outside its message exceed a quarter of `--mask_memory_mib`; "
     "metadata `limit`.",
     "Use lists of blocks, or raise the limit."},
    {"OUT_OF_RANGE", reason::kMaskTooComplex,
     "The mask would take too long to compile; the message names the pattern.",
     "Use fewer nodes, or a list of blocks."},
    {"FAILED_PRECONDITION", reason::kMaskUnknown,
     "`problem.mask.id` names a mask that this caller has not sent, or that the server has "
     "forgotten.",
     "Send the mask itself (attnd's clients do)."},
    {"FAILED_PRECONDITION", reason::kCaptureLost,
     "`capture.previous` or a pattern names an attention map that the server no longer keeps.",
     "Capture again (`SparseTraining` does)."},
    {"UNIMPLEMENTED", reason::kProblemUnsupported,
     "This engine cannot run the problem; the message names the field.",
     "Change that field, use another replica, or compute locally."},
    {"FAILED_PRECONDITION", reason::kRegionUnknown,
     "`shared_memory` names a region that the caller does not share with this process, or a use "
     "that has ended; or the call came over TCP.",
     "Send the tensors in the message (attnd's clients do)."},
    {"UNAUTHENTICATED", reason::kTokenMissing,
     "`--token_file` is set and the call has no bearer token.",
     "Send `authorization: Bearer TOKEN`; attnctl and Python take `token`."},
    {"UNAUTHENTICATED", reason::kTokenInvalid, "The token is not in the server's `--token_file`.",
     "Get a valid token from the operator."},
    {"RESOURCE_EXHAUSTED", reason::kTenantQuota,
     "The caller's own `--caller_max_calls` or `--caller_memory_mib` is used up, also by masks "
     "that arrive or wait to be compiled; or it holds half of the places of module calls, or of "
     "the memory of calls, of what their requests become and of unread replies (metadata `limit`: "
     "`module_calls_of_caller`, `call_bytes`).",
     "Wait as RetryInfo says and have fewer calls in flight (attnd's clients do both)."},
    {"UNAVAILABLE", reason::kQueueFull,
     "`--max_calls` or `--max_queue_seconds` of work is ahead, or the caller's admitted calls "
     "need the time until their deadlines; or other callers hold the places of module calls.",
     "Try another replica at once, or wait as RetryInfo says (attnd's clients do). If it lasts, "
     "add a daemon."},
    {"UNAVAILABLE", reason::kMemoryPressure,
     "Other calls have reserved all of `--memory_limit_mib`, or hold the memory of calls and "
     "unread replies (metadata `limit`: `call_bytes`).",
     "Try another replica at once, or wait as RetryInfo says (attnd's clients do). If it lasts, "
     "raise `--memory_limit_mib`."},
    {"UNAVAILABLE", reason::kHbmPressure,
     "Other calls have reserved the GPU's memory, or leases that are too young to evict hold it.",
     "Try another replica at once, or wait as RetryInfo says (attnd's clients do). If it lasts, "
     "lower `--lease_hbm_fraction`, or release modules that nobody uses."},
    {"UNAVAILABLE", reason::kDraining, "The server is about to stop, or to be started again.",
     "Try another replica: give the client a second address. With `wait_for_ready` attnd's clients "
     "wait for the restart too."},
    {"UNAVAILABLE", reason::kDeviceLost,
     "The GPU failed for good; the server restarts when its other GPUs have finished.",
     "Try another replica. The operator looks at `dmesg` for Xid errors."},
    {"DEADLINE_EXCEEDED", reason::kDeadlineUnmeetable,
     "The work ahead, at the device's measured pace, and half of the call's own estimate leave no "
     "time to answer.",
     "Set a later deadline, try another replica, or send smaller calls."},
    {"DEADLINE_EXCEEDED", reason::kDeadlineExceededQueue,
     "The deadline passed before the engine began (metadata `stage`).",
     "Set a later deadline, try another replica, or send smaller calls."},
    {"DEADLINE_EXCEEDED", reason::kDeadlineExceededKernel,
     "The deadline passed while the engine computed.",
     "Set a later deadline, try another replica, or send smaller calls."},
    {"DEADLINE_EXCEEDED", reason::kStreamIdle,
     "A stream was not sent, or a reply, unary or streamed, not read for `--stream_idle_seconds`.",
     "Send without pauses, on slow links in smaller chunks. A caller that does not read sees "
     "gRPC's CANCELLED, since the status is behind the unread data."},
    {"DEADLINE_EXCEEDED", reason::kStreamTooSlow,
     "A stream was sent, or a reply read, slower than 64 KiB/s on average.",
     "Use a faster connection, or send fewer bytes at a time."},
    {"DEADLINE_EXCEEDED", reason::kDeadlineExceededTransfer,
     "`--max_deadline_seconds` passed while a call was sent or read.",
     "Send smaller calls, or use a faster connection."},
    {"CANCELLED", reason::kCancelled,
     "The caller cancelled the call, or its connection broke (metadata `stage`).",
     "If you did not cancel, look at the network."},
    {"CANCELLED", reason::kDraining,
     "`--drain_timeout` passed, or a second SIGTERM came, before the call ran.",
     "Try another replica (attnd's clients do)."},
    {"FAILED_PRECONDITION", reason::kLeaseLost,
     "The residual that the token names is gone; metadata `cause`: released, expired, evicted, "
     "replaced, device_lost, unknown.",
     "Send all tensors (attnd's clients do)."},
    {"FAILED_PRECONDITION", reason::kEpochChanged,
     "The token is older than the server's last start.", "Send all tensors (attnd's clients do)."},
    {"FAILED_PRECONDITION", reason::kWrongReplica,
     "The token was made by another replica (its host name or `--listen` differ).",
     "Ask that replica, or send all tensors (attnd's clients do)."},
    {"FAILED_PRECONDITION", reason::kLeaseMismatch,
     "The forward that made the token was of another problem.",
     "Send all tensors, and look for the difference between forward and backward."},
    {"PERMISSION_DENIED", reason::kLeaseNotOwned,
     "The token belongs to another caller, or is forged.",
     "Send all tensors, with the identity that made the forward."},
    {"INVALID_ARGUMENT", reason::kBadLayout,
     "A module's layout is wrong; the message begins with the path, as "
     "`block[0].op[3].linear.weight`.",
     "Correct the layout at that path."},
    {"INVALID_ARGUMENT", reason::kDigestMismatch,
     "The bytes of a tensor of PutTensors do not have its SHA-256.", "Send the tensor again."},
    {"OUT_OF_RANGE", reason::kModuleTooLarge,
     "The module needs more than `--module_memory_mib` or `--caller_module_mib` even alone, or "
     "one call more than `--memory_limit_mib`.",
     "Set smaller limits (`max_rows`), recompute more, or offload fewer layers; or raise the "
     "limit."},
    {"UNIMPLEMENTED", reason::kModuleUnsupported,
     "This server or its engine does not offer the field that the message names.",
     "Leave the field out, or use another replica."},
    {"RESOURCE_EXHAUSTED", reason::kModuleQuota,
     "`--module_memory_mib` or `--caller_module_mib` is used up now, `--max_modules` are "
     "registered, or states take all of `--module_state_mib`.",
     "Release modules (`attnctl module list`, `attnctl module release`), or use another replica."},
    {"FAILED_PRECONDITION", reason::kModuleExists, "The caller has another module of this name.",
     "Release it, or take another name."},
    {"FAILED_PRECONDITION", reason::kModuleTaken,
     "Another registration of this name has come since; metadata `name`, `epoch` (its owner "
     "epoch), `got`.",
     "Have one owner for each module: end the process that is left over, or take another name."},
    {"FAILED_PRECONDITION", reason::kModuleLost,
     "The module is gone; metadata `cause`: released, expired, failed, device_lost, taken, "
     "unknown.",
     "Register it again and put its tensors (attnd's clients do)."},
    {"PERMISSION_DENIED", reason::kModuleNotOwned,
     "The token belongs to another caller, or is forged.", "Register a module of your own."},
    {"FAILED_PRECONDITION", reason::kWeightsIncomplete,
     "Parameters have not been put; the message names the first.", "Send them with PutTensors."},
    {"FAILED_PRECONDITION", reason::kSequenceMismatch,
     "The call is for another state than the module has; metadata `expected`.",
     "Take the state that the module has, or put yours."},
    {"FAILED_PRECONDITION", reason::kStepConflict,
     "Another Step or PutTensors has made the next state of this sequence.",
     "Let one process write a module."},
    {"FAILED_PRECONDITION", reason::kStepOutOfOrder,
     "A Step or PutTensors is of neither this sequence nor the last; metadata `expected`.",
     "Take the state that the module has, or put yours."},
    {"FAILED_PRECONDITION", reason::kGradientIncomplete,
     "The accumulator holds other micro-batches than Step says; metadata `missing`. Or the client "
     "does not know whether a backward that has failed was added.",
     "Send the missing micro-batches; after a failed backward clear the gradients (`zero_grad`, "
     "`discard`), and compute the step again."},
    {"FAILED_PRECONDITION", reason::kMicroBatchConflict,
     "Another dy, rows, layers, seed or offset came under this number before.",
     "Give each micro-batch of a step a number of its own."},
    {"UNAVAILABLE", reason::kMicroBatchEarly,
     "Others have to be added before it, and as many wait as may, or hold half of the memory.",
     "Send the earlier one, and wait as RetryInfo says (attnd's clients do)."},
    {"FAILED_PRECONDITION", reason::kSumFailed,
     "The GPUs of the replicas' daemons could not exchange gradients, or not in time; gradients "
     "are "
     "as before.",
     "Exchange them in a new group, or through the workers (attnd's clients do). `NCCL_DEBUG=WARN` "
     "in the daemons' environment says more."},
    {"UNAVAILABLE", reason::kActivationPressure,
     "Activations of `limits.kept_rows` rows are kept already.",
     "Send a Backward first, wait as RetryInfo says, or set `makes_room`."},
    {"UNAVAILABLE", reason::kStateUnavailable,
     "The server cannot make or open the files of a durable module; its log says why "
     "(`module_state_unavailable`).",
     "Use another replica, or DURABILITY_PROCESS. The operator looks at the folder's space and "
     "rights."},
    {"INTERNAL", reason::kEngineFailed, "The engine failed a launch; the daemon's log says why.",
     "Retry once on another replica, and report it."},
};

// Reasons that no server sends: clients give them.
inline constexpr ErrorReason kClientReasons[] = {
    {"UNAVAILABLE", "NOT_CONNECTED", "`attnd.connect()` was not called in this process.",
     "Call it first, in each process that is spawned too."},
    {"UNAVAILABLE", "UNREACHABLE", "No daemon answers at the address.",
     "Start one there, look at firewalls and at TLS on both sides; `attnctl health` on its host."},
    {"UNAVAILABLE", "NO_ADDRESS",
     "The folder, file or DNS name that the client was given has no daemon's address.",
     "Start a daemon; each file in a folder of addresses has a line `host:port`."},
    {"UNAVAILABLE", "CANCELLED_BY_SERVER", "The daemon ended the call, as it does when it stops.",
     "Give a second address, or `wait_for_ready` to wait for its restart."},
    {"DEADLINE_EXCEEDED", "TIMEOUT", "No answer came within the client's timeout.",
     "Give the call a longer `timeout` if the daemon is merely slow."},
    {"NOT_FOUND", "NO_PROGRAM", "`attnd.serve()` found no daemon to start.",
     "Install the wheel `attnd-server`, or name a program."},
    {"UNIMPLEMENTED", "UNKNOWN_CALL",
     "The server does not know the call: it is another program, or an attnd of another version.",
     "Check the address and both versions."},
    {"INVALID_ARGUMENT", "INVALID_ARGUMENT",
     "An argument has a wrong value or type; the message names it.", "Correct the argument."},
    {"FAILED_PRECONDITION", "STATE_LOST",
     "The daemon no longer has the state of the module, and the client has not kept what would "
     "make it again.",
     "Load your own checkpoint, from which the module goes on. Next time give `snapshot_every=`, "
     "or a `replay_mib=` that holds all calls since the daemon's last saved state."},
    {"FAILED_PRECONDITION", "NOT_STICKY",
     "Calls of a module without `replay_mib`, or of a group, reach several daemons behind one "
     "address.",
     "Let the proxy hash the metadata `attnd-module`, or give the daemons' own addresses."},
};

// Returns what to do about an error of that reason; empty where it is not known.
constexpr absl::string_view CureOf(absl::string_view code, absl::string_view name) {
  for (const ErrorReason& reason : kErrorReasons) {
    if (reason.code == code && reason.name == name) return reason.cure;
  }
  for (const ErrorReason& reason : kClientReasons) {
    if (reason.code == code && reason.name == name) return reason.cure;
  }
  return "";
}

}  // namespace attnd
