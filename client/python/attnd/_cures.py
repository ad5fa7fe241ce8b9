"""The notes of errors, by (code, reason): what to do. `./dev docs` writes this file."""
from __future__ import annotations

from typing import Dict, Tuple

CURES: Dict[Tuple[str, str], str] = {
    ("OUT_OF_RANGE", "TOO_LARGE_FOR_DEVICE"):
        "Split the call by batch or heads, or raise the limit.",
    ("OUT_OF_RANGE", "REPLY_TOO_LARGE"):
        "Split the call by batch or heads.",
    ("UNIMPLEMENTED", "MASK_UNSUPPORTED"):
        "Use coarser blocks, or another replica.",
    ("OUT_OF_RANGE", "MASK_TOO_LARGE"):
        "Use lists of blocks, or raise the limit.",
    ("OUT_OF_RANGE", "MASK_TOO_COMPLEX"):
        "Use fewer nodes, or a list of blocks.",
    ("FAILED_PRECONDITION", "MASK_UNKNOWN"):
        "Send the mask itself (attnd's clients do).",
    ("FAILED_PRECONDITION", "CAPTURE_LOST"):
        "Capture again (SparseTraining does).",
    ("UNIMPLEMENTED", "PROBLEM_UNSUPPORTED"):
        "Change that field, use another replica, or compute locally.",
    ("FAILED_PRECONDITION", "REGION_UNKNOWN"):
        "Send the tensors in the message (attnd's clients do).",
    ("UNAUTHENTICATED", "TOKEN_MISSING"):
        "Send authorization: Bearer TOKEN; attnctl and Python take token.",
    ("UNAUTHENTICATED", "TOKEN_INVALID"):
        "Get a valid token from the operator.",
    ("RESOURCE_EXHAUSTED", "TENANT_QUOTA"):
        "Wait as RetryInfo says and have fewer calls in flight (attnd's clients do both).",
    ("UNAVAILABLE", "QUEUE_FULL"):
        "Try another replica at once, or wait as RetryInfo says (attnd's clients do). If it lasts, add a daemon.",
    ("UNAVAILABLE", "MEMORY_PRESSURE"):
        "Try another replica at once, or wait as RetryInfo says (attnd's clients do). If it lasts, raise "
        "--memory_limit_mib.",
    ("UNAVAILABLE", "HBM_PRESSURE"):
        "Try another replica at once, or wait as RetryInfo says (attnd's clients do). If it lasts, lower "
        "--lease_hbm_fraction, or release modules that nobody uses.",
    ("UNAVAILABLE", "DRAINING"):
        "Try another replica: give the client a second address. With wait_for_ready attnd's clients wait for the "
        "restart too.",
    ("UNAVAILABLE", "DEVICE_LOST"):
        "Try another replica. The operator looks at dmesg for Xid errors.",
    ("DEADLINE_EXCEEDED", "DEADLINE_UNMEETABLE"):
        "Set a later deadline, try another replica, or send smaller calls.",
    ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED_IN_QUEUE"):
        "Set a later deadline, try another replica, or send smaller calls.",
    ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED_IN_KERNEL"):
        "Set a later deadline, try another replica, or send smaller calls.",
    ("DEADLINE_EXCEEDED", "STREAM_IDLE"):
        "Send without pauses, on slow links in smaller chunks. A caller that does not read sees gRPC's CANCELLED, since "
        "the status is behind the unread data.",
    ("DEADLINE_EXCEEDED", "STREAM_TOO_SLOW"):
        "Use a faster connection, or send fewer bytes at a time.",
    ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED_IN_TRANSFER"):
        "Send smaller calls, or use a faster connection.",
    ("CANCELLED", "CANCELLED_BY_CALLER"):
        "If you did not cancel, look at the network.",
    ("CANCELLED", "DRAINING"):
        "Try another replica (attnd's clients do).",
    ("FAILED_PRECONDITION", "LEASE_LOST"):
        "Send all tensors (attnd's clients do).",
    ("FAILED_PRECONDITION", "EPOCH_CHANGED"):
        "Send all tensors (attnd's clients do).",
    ("FAILED_PRECONDITION", "WRONG_REPLICA"):
        "Ask that replica, or send all tensors (attnd's clients do).",
    ("FAILED_PRECONDITION", "LEASE_MISMATCH"):
        "Send all tensors, and look for the difference between forward and backward.",
    ("PERMISSION_DENIED", "LEASE_NOT_OWNED"):
        "Send all tensors, with the identity that made the forward.",
    ("OUT_OF_RANGE", "MODULE_TOO_LARGE"):
        "Set smaller limits (max_rows), recompute more, or offload fewer layers; or raise the limit.",
    ("UNIMPLEMENTED", "MODULE_UNSUPPORTED"):
        "Leave the field out, or use another replica.",
    ("RESOURCE_EXHAUSTED", "MODULE_QUOTA"):
        "Release modules (attnctl module list, attnctl module release), or use another replica.",
    ("FAILED_PRECONDITION", "MODULE_EXISTS"):
        "Release it, or take another name.",
    ("FAILED_PRECONDITION", "MODULE_TAKEN"):
        "Have one owner for each module: end the process that is left over, or take another name.",
    ("FAILED_PRECONDITION", "MODULE_LOST"):
        "Register it again and put its tensors (attnd's clients do).",
    ("PERMISSION_DENIED", "MODULE_NOT_OWNED"):
        "Register a module of your own.",
    ("FAILED_PRECONDITION", "WEIGHTS_INCOMPLETE"):
        "Send them with PutTensors.",
    ("FAILED_PRECONDITION", "SEQUENCE_MISMATCH"):
        "Take the state that the module has, or put yours.",
    ("FAILED_PRECONDITION", "STEP_CONFLICT"):
        "Let one process write a module.",
    ("FAILED_PRECONDITION", "STEP_OUT_OF_ORDER"):
        "Take the state that the module has, or put yours.",
    ("FAILED_PRECONDITION", "GRADIENT_INCOMPLETE"):
        "Send the missing micro-batches; after a failed backward clear the gradients (zero_grad, discard), and compute "
        "the step again.",
    ("FAILED_PRECONDITION", "MICRO_BATCH_CONFLICT"):
        "Give each micro-batch of a step a number of its own.",
    ("UNAVAILABLE", "MICRO_BATCH_EARLY"):
        "Send the earlier one, and wait as RetryInfo says (attnd's clients do).",
    ("FAILED_PRECONDITION", "SUM_FAILED"):
        "Exchange them in a new group, or through the workers (attnd's clients do). NCCL_DEBUG=WARN in the daemons' "
        "environment says more.",
    ("UNAVAILABLE", "ACTIVATION_PRESSURE"):
        "Send a Backward first, wait as RetryInfo says, or set makes_room.",
    ("UNAVAILABLE", "STATE_UNAVAILABLE"):
        "Use another replica, or DURABILITY_PROCESS. The operator looks at the folder's space and rights.",
    ("INTERNAL", "ENGINE_FAILED"):
        "Retry once on another replica, and report it.",
    ("UNAVAILABLE", "NOT_CONNECTED"):
        "Call it first, in each process that is spawned too.",
    ("UNAVAILABLE", "UNREACHABLE"):
        "Start one there, look at firewalls and at TLS on both sides; attnctl health on its host.",
    ("UNAVAILABLE", "NO_ADDRESS"):
        "Start a daemon; each file in a folder of addresses has a line host:port.",
    ("UNAVAILABLE", "CANCELLED_BY_SERVER"):
        "Give a second address, or wait_for_ready to wait for its restart.",
    ("DEADLINE_EXCEEDED", "TIMEOUT"):
        "Give the call a longer timeout if the daemon is merely slow.",
    ("NOT_FOUND", "NO_PROGRAM"):
        "Install the wheel attnd-server, or name a program.",
    ("UNIMPLEMENTED", "UNKNOWN_CALL"):
        "Check the address and both versions.",
    ("FAILED_PRECONDITION", "STATE_LOST"):
        "Load your own checkpoint, from which the module goes on. Next time give snapshot_every=, or a replay_mib= that "
        "holds all calls since the daemon's last saved state.",
    ("FAILED_PRECONDITION", "NOT_STICKY"):
        "Let the proxy hash the metadata attnd-module, or give the daemons' own addresses.",
}
