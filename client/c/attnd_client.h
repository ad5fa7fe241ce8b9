// attnd_client: exact attention on remote daemons from any language that can call C.
//
//     attnd_call* call = attnd_call_new(NULL, 30.0, ATTND_PRIORITY_NORMAL);
//     attnd_client* client = attnd_client_new(&options, call);
//     int code = attnd_forward(client, &problem, &tensors, call);
//     if (code != ATTND_OK) puts(attnd_call_message(call));
//
// Structures begin with struct_size = sizeof(the structure) as the caller compiled it: later
// versions append fields, and what an older caller lacks is zero. Zero is each field's default
// unless said otherwise. Nothing is kept of a structure or an array after its function has
// returned.
//
// Shapes, layouts, units and the meaning of each problem field are those of attention/problem.h.
// Errors: a function that returns int gives ATTND_OK or gRPC's status code (3 INVALID_ARGUMENT,
// 4 DEADLINE_EXCEEDED, 14 UNAVAILABLE, ...), and the call then holds message and detail. No C++
// exception crosses this interface. After an error the contents of the outputs are unspecified.
// Threads: every function may be called from any thread; one attnd_call serves one operation at a
// time. A client must not be used in a process forked from the one that made it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ATTND_API __attribute__((visibility("default")))

/* Grows when the meaning of something existing changes; a caller refuses another number. */
#define ATTND_ABI_VERSION 3

enum { ATTND_OK = 0 };
enum { ATTND_FLOAT16 = 1, ATTND_BFLOAT16 = 2, ATTND_FLOAT32 = 3 };
enum { ATTND_BHLD = 1, ATTND_BLHD = 2, ATTND_PACKED_THD = 3, ATTND_PACKED_HTD = 4 };
enum { ATTND_ALIGN_NONE = 0, ATTND_TOP_LEFT = 1, ATTND_BOTTOM_RIGHT = 2, ATTND_OFFSETS = 3 };
enum { ATTND_SOFTMAX = 0, ATTND_ZERO_REST = 1, ATTND_SINK = 2 };
enum {
  ATTND_PRIORITY_DEFAULT = 0,
  ATTND_PRIORITY_LOW = 1,
  ATTND_PRIORITY_NORMAL = 2,
  ATTND_PRIORITY_HIGH = 3
};

typedef struct attnd_client attnd_client;
typedef struct attnd_call attnd_call;
/* What servers keep of one forward, so that its backward sends d_o alone. */
typedef struct attnd_residual attnd_residual;
/* A mask by description, checked and in canonical form. Immutable. */
typedef struct attnd_mask attnd_mask;

typedef struct attnd_int32_array {
  const int32_t* data;
  int64_t count;
} attnd_int32_array;

typedef struct attnd_float_array {
  const float* data;
  int64_t count;
} attnd_float_array;

typedef struct attnd_client_options {
  size_t struct_size;
  const char* const* addresses; /* "host:port", "unix:path", or a gRPC target; replicas */
  int64_t address_count;
  int32_t channels_per_address; /* connections; 0: 8 */
  int32_t use_tls;
  const char* tls_ca_file; /* PEM; NULL: the system's authorities */
  const char* tls_certificate_file;
  const char* tls_key_file;
  const char* tls_server_name;
  const char* bearer_token;
  double timeout_seconds;  /* of a call that names none; 0: 30 */
  int32_t max_attempts;    /* of one shard, the first included; 0: 3 */
  int32_t wait_for_ready;  /* 1: wait for a connection until the deadline */
  int64_t shard_bytes;     /* 0: 8 MiB */
  int64_t max_reply_bytes; /* 0: 256 MiB */
  /* 1: may cut calls where results must be merged, exact to rounding and not bitwise */
  int32_t merge_partial_results;
  const char* proxy; /* "http://host:port" or "environment" (http_proxy and the like); NULL: none */
} attnd_client_options;

typedef struct attnd_problem {
  size_t struct_size;
  int64_t batch, q_heads, kv_heads, q_len, kv_len, qk_head_dim, v_head_dim;
  int32_t element, layout;
  int32_t has_scale;
  float scale;
  float softcap;
  int32_t alignment;
  attnd_int32_array offsets;
  int32_t causal;
  int32_t has_window;
  int64_t window_left, window_right; /* −1: unbounded */
  attnd_int32_array kv_lengths, cu_seqlens_q, cu_seqlens_k;
  int32_t has_bool_mask;
  int32_t has_bias;
  int64_t bool_mask_shape[4];
  int64_t bias_shape[4];
  int32_t bias_element;
  int32_t bias_want_gradient;
  attnd_float_array alibi_slopes;
  uint64_t dropout_seed, dropout_offset;
  uint32_t dropout_threshold; /* p·256, 0..255 */
  int32_t denominator;
  attnd_float_array sink_logits;
  int32_t accumulate_float16;
  int32_t allow_nondeterministic;
  const attnd_mask* mask; /* NULL: none; not beside has_bool_mask */
} attnd_problem;

/* Asks a forward for its averaged attention map (attnd/v1/capture.proto). What came of it: float32
 * [⌈q_len / block⌉, ⌈kv_len / block⌉] in `pooled`, and "captured" of the call's result: mean,
 * variance, skewness, distance (null where there is none), token (text, "" when not kept). */
typedef struct attnd_capture {
  size_t struct_size;
  int64_t block;
  int32_t keep;
  const char* previous; /* the token of an earlier capture with this client; NULL: none */
  float* pooled;
} attnd_capture;

typedef struct attnd_forward_tensors {
  size_t struct_size;
  const void *q, *k, *v;
  const uint8_t* mask_bits; /* iff has_bool_mask */
  const void* bias;         /* iff has_bias */
  void* o;
  float* lse; /* NULL: not wanted */
  /* NULL: nothing is kept. Else it receives what the servers keep, NULL when that is nothing. */
  attnd_residual** keep;
  const attnd_capture* capture; /* NULL: none */
} attnd_forward_tensors;

typedef struct attnd_backward_tensors {
  size_t struct_size;
  const void *q, *k, *v;
  const uint8_t* mask_bits;
  const void* bias;
  const void* o;
  const float* lse;
  const void* d_o;
  const float* d_lse; /* NULL: zero */
  void *d_q, *d_k, *d_v;
  float* d_bias; /* of the bias's shape, iff bias_want_gradient */
  float* d_sink; /* [batch, q_heads], iff the denominator is a sink */
  /* Of the forward of the same tensors and problem; NULL: none. The tensors are given all the same:
   * what a server has lost is sent. */
  const attnd_residual* residual;
} attnd_backward_tensors;

typedef struct attnd_progress {
  int64_t shards_done, shards_total, bytes_sent, bytes_received, bytes_total;
} attnd_progress;

/* What a client has had to do since it was made. retries: of pieces of calls, after seconds_waiting
 * in all; failovers: of these at another address, and modules that have moved; leases_lost:
 * residuals that a server had no more; replays: calls of modules repeated after a restart. */
typedef struct attnd_counters {
  size_t struct_size;
  int64_t calls, failed_calls, retries, failovers, leases_lost, replays;
  double seconds_waiting;
} attnd_counters;

ATTND_API int attnd_abi_version(void);
ATTND_API const char* attnd_version(void); /* release and commit */

/* A call: how long, under which name, whether cancelled; and then what came of it.
 * request_id: at most 64 bytes, NULL: a random one. timeout_seconds: negative: the client's. */
ATTND_API attnd_call* attnd_call_new(const char* request_id, double timeout_seconds,
                                     int32_t priority);
ATTND_API void attnd_call_free(attnd_call* call);   /* no operation may be running */
ATTND_API void attnd_call_cancel(attnd_call* call); /* ends with 1 CANCELLED, if not done yet */
/* hook: called every 50 ms while an operation waits, on the thread that called it, for example to
 * handle signals; anything but 0 cancels the operation. */
ATTND_API void attnd_call_set_poll_hook(attnd_call* call, int (*hook)(void* argument),
                                        void* argument);
/* traceparent: W3C's, of the span that the call is part of, for the daemon's logs and spans. */
ATTND_API void attnd_call_set_traceparent(attnd_call* call, const char* traceparent);
ATTND_API void attnd_call_get_progress(const attnd_call* call, attnd_progress* progress);
/* After the operation has ended; valid until the next one or attnd_call_free. Texts are UTF-8.
 * detail: {"reason", "domain", "metadata": {...}, "retry_after": seconds}, "{}" without any.
 * result: of forward and backward the receipt, of the others what they say; "{}" after an error. */
ATTND_API int attnd_call_code(const attnd_call* call);
ATTND_API const char* attnd_call_message(const attnd_call* call);
ATTND_API const char* attnd_call_detail_json(const attnd_call* call);
ATTND_API const char* attnd_call_result_json(attnd_call* call);

/* NULL after an error. Connects when the first call needs it. */
ATTND_API attnd_client* attnd_client_new(const attnd_client_options* options, attnd_call* call);
ATTND_API void attnd_client_free(attnd_client* client); /* no call may be running */
/* What it has had to do so far; any time, any thread. */
ATTND_API void attnd_client_get_counters(const attnd_client* client, attnd_counters* counters);

/* Memory for tensors, 64-byte aligned, zeroed or not. With one address, "unix:path", it is shared
 * with the daemon, and calls do not copy what lies there; elsewhere it is ordinary memory. It may
 * outlive the client. NULL when there is none. A forked process has the same shared memory, so only
 * one of the two may use it. */
typedef struct attnd_memory attnd_memory;
ATTND_API attnd_memory* attnd_memory_new(attnd_client* client, int64_t bytes);
ATTND_API void* attnd_memory_data(const attnd_memory* memory);
ATTND_API void attnd_memory_free(attnd_memory* memory);

ATTND_API int attnd_forward(attnd_client* client, const attnd_problem* problem,
                            const attnd_forward_tensors* tensors, attnd_call* call);
ATTND_API int attnd_backward(attnd_client* client, const attnd_problem* problem,
                             const attnd_backward_tensors* tensors, attnd_call* call);

/* Attention within this process: the daemon's engine for processors, without a server. Problems and
 * tensors are those of attnd_forward and attnd_backward, and so are errors of what they say; keep
 * and capture are NULL. The receipt's backend is "local". attnd_call_cancel ends a call soon, its
 * timeout does not. threads: 0: as many as this process may use. float64: 1: in float64 and plain
 * loops, for comparisons. Any threads may call it at a time; a forked process needs one of its own.
 */
typedef struct attnd_local attnd_local;
ATTND_API attnd_local* attnd_local_new(int32_t threads, int32_t float64);
ATTND_API void attnd_local_free(attnd_local* local); /* no call may be running; NULL is fine */
ATTND_API int attnd_local_forward(attnd_local* local, const attnd_problem* problem,
                                  const attnd_forward_tensors* tensors, attnd_call* call);
ATTND_API int attnd_local_backward(attnd_local* local, const attnd_problem* problem,
                                   const attnd_backward_tensors* tensors, attnd_call* call);

/* `spec`: a serialized attnd.v1.MaskSpec without id, for problems of these sizes: batch entries or
 * packed sequences, and the longest one's rows and keys. NULL after an error. Any number of calls,
 * clients and threads may use it at a time; freed when none does any more. NULL is fine there. */
ATTND_API attnd_mask* attnd_mask_new(const void* spec, int64_t spec_bytes, int64_t batch,
                                     int64_t q_heads, int64_t rows, int64_t keys, attnd_call* call);
ATTND_API void attnd_mask_free(attnd_mask* mask);
/* The 32 bytes by which servers know it: equal for equal masks. They live as long as the mask. */
ATTND_API const uint8_t* attnd_mask_id(const attnd_mask* mask);
/* What the daemon at that address says of problem->mask in such calls; it keeps it for them. The
 * result is JSON, with the field names of CompileMaskResponse; its id is in hexadecimal digits. */
ATTND_API int attnd_compile_mask(attnd_client* client, int32_t address_index,
                                 const attnd_problem* problem, attnd_call* call);

/* Builds a block pattern: `request` is a serialized attnd.v1.BuildPatternRequest without token.
 * With `token`, that of a capture whose map is kept, the server that keeps it builds; else
 * `request` brings the averages, and they are built from here, without a server, and `client` may
 * be NULL. The result: {"indptr": [...], "indices": [...], "block", "density"}. */
ATTND_API int attnd_build_pattern(attnd_client* client, const void* request, int64_t request_bytes,
                                  const char* token, attnd_call* call);
/* Frees a kept map on its server. */
ATTND_API int attnd_release_capture(attnd_client* client, const char* token, attnd_call* call);

/* Gives the servers' memory back, soon; waits for nothing. No call may be using it. It may outlive
 * its client. NULL is fine. */
ATTND_API void attnd_residual_free(attnd_residual* residual);
/* Bytes that servers hold for it, as far as is known here. */
ATTND_API int64_t attnd_residual_bytes(const attnd_residual* residual);

/* Of the address with this index. health: 1 serving, 0 not. */
ATTND_API int attnd_server_info(attnd_client* client, int32_t address_index, attnd_call* call);
ATTND_API int attnd_check_health(attnd_client* client, int32_t address_index, int32_t* health,
                                 attnd_call* call);

/* ---- Modules: stacks of layers whose weights stay on the daemon (attnd/v1/module.proto).
 *
 *     attnd_module* module = attnd_module_register(client, request, bytes, -1, call);
 *     attnd_module_put(module, weights, count, -1, 1, call);
 *     attnd_module_forward(module, &forward, call);    -> activations
 *     attnd_module_backward(module, &backward, call);  -> dx; the gradients stay there
 *     attnd_module_step(module, request, bytes, call);
 *
 * Messages are serialized protobuf. Results are JSON in attnd_call_result_json, with the field
 * names of the message. Calls are tried again as the client's are, count once, and survive a
 * restart of the daemon. */
typedef struct attnd_module attnd_module;
/* What a forward left for its backward. */
typedef struct attnd_activations attnd_activations;

typedef struct attnd_module_forward_tensors {
  size_t struct_size;
  const void* header; /* a ModuleForwardHeader: rows, training, seed, offset */
  int64_t header_bytes;
  const void *x, *memory, *mask_bits; /* read once, and copied */
  int64_t x_bytes, memory_bytes, mask_bits_bytes;
  void* y; /* of x_bytes */
  /* NULL: nothing is kept. Freed by attnd_activations_free, before its module. */
  attnd_activations** keep;
} attnd_module_forward_tensors;

typedef struct attnd_module_backward_tensors {
  size_t struct_size;
  const attnd_activations* activations;
  const void* dy;
  int64_t dy_bytes;
  void *dx, *d_memory; /* NULL: not wanted */
  int64_t d_memory_bytes;
  int32_t no_weight_gradients; /* 1: adds nothing to the gradients */
  uint64_t turn;               /* 0: none. Not with no_weight_gradients. */
} attnd_module_backward_tensors;

typedef struct attnd_module_tensor {
  int32_t kind; /* TensorKind: 1 weight, 2 gradient, 3, 4, 5 moments */
  int32_t element;
  const char* name;
  void* data; /* read by put, written by get */
  int64_t bytes;
  const int64_t* shape;
  int32_t dimensions;
} attnd_module_tensor;

/* `request`: a RegisterModuleRequest. `replay_bytes`: of calls kept for replay after a restart of
 * the daemon; negative: 512 MiB. NULL after an error, and after a dry run, whose result is the
 * answer all the same. The client outlives it. */
ATTND_API attnd_module* attnd_module_register(attnd_client* client, const void* request,
                                              int64_t request_bytes, int64_t replay_bytes,
                                              attnd_call* call);
/* After every so many steps and puts its state is copied here, so that it can be made anew where
 * the calls kept reach back no further than there. 0: never, as at first. */
ATTND_API void attnd_module_keep_snapshots(attnd_module* module, uint64_t every);
/* 1: its state could be made again if the daemon ended now, from the calls kept or a snapshot. */
ATTND_API int attnd_module_is_recoverable(attnd_module* module);
/* No call may be using it; the daemon keeps the module. */
ATTND_API void attnd_module_free(attnd_module* module);
ATTND_API int attnd_module_release(attnd_module* module, attnd_call* call);
ATTND_API int attnd_module_status(attnd_module* module, attnd_call* call);
ATTND_API int attnd_module_list(attnd_client* client, attnd_call* call);
/* Before any backward: `ranks` processes train the module, and rank r's backwards have the numbers
 * r, r + ranks, ... Each calls the same steps, which wait until all ranks' backwards are there and
 * are done once. After a put of one rank the others follow. */
ATTND_API int attnd_module_join(attnd_module* module, int32_t rank, int32_t ranks,
                                attnd_call* call);
ATTND_API int attnd_module_follow(attnd_module* module, attnd_call* call);
/* The state that calls name, and how many backwards have been called on it. */
ATTND_API uint64_t attnd_module_sequence(const attnd_module* module);
ATTND_API uint32_t attnd_module_micro_batches(const attnd_module* module);
/* For one backward, where threads call several beside each other: gradients are added in the order
 * in which turns were reserved. Where a backward fails, those of later turns fail at once with
 * FAILED_PRECONDITION. They wait for a turn that no backward takes until that is given up, with
 * which they fail too. */
ATTND_API uint64_t attnd_module_reserve_turn(attnd_module* module);
ATTND_API void attnd_module_give_up_turn(attnd_module* module, uint64_t turn);

ATTND_API int attnd_module_forward(attnd_module* module,
                                   const attnd_module_forward_tensors* tensors, attnd_call* call);
ATTND_API int attnd_module_backward(attnd_module* module,
                                    const attnd_module_backward_tensors* tensors, attnd_call* call);
/* Tells the daemon, where no backward has used them. NULL is fine. */
ATTND_API void attnd_activations_free(attnd_activations* activations);
ATTND_API int attnd_module_gradient_stats(attnd_module* module, attnd_call* call);
/* With each parameter's; all_norms: sums and largest numbers too. */
ATTND_API int attnd_module_parameter_stats(attnd_module* module, int32_t all_norms,
                                           attnd_call* call);
/* A number that changes with the bytes, but for one change in 2^64. No cryptography. */
ATTND_API uint64_t attnd_digest(const void* data, int64_t bytes);
/* `request`: a StepRequest without token, sequence and micro_batches. */
ATTND_API int attnd_module_step(attnd_module* module, const void* request, int64_t request_bytes,
                                attnd_call* call);
/* Replaces the gradients by the sums of several modules', between whose daemons they go directly.
 * `request`: a SumGradientsRequest without token, sequence and micro_batch; the result is a
 * SumGradientsResponse. Until the next step only this handle may be used for the module. */
ATTND_API int attnd_module_sum_gradients(attnd_module* module, const void* request,
                                         int64_t request_bytes, attnd_call* call);
/* optimizer_step: negative: as it is. complete: every parameter must be there then. */
ATTND_API int attnd_module_put(attnd_module* module, const attnd_module_tensor* tensors,
                               int64_t count, int64_t optimizer_step, int32_t complete,
                               attnd_call* call);
/* Gradients, which replace those so far of the same parameters, as a backward of its own: it counts
 * in attnd_module_micro_batches. The others, weights and activations stay. */
ATTND_API int attnd_module_put_gradients(attnd_module* module, const attnd_module_tensor* tensors,
                                         int64_t count, attnd_call* call);
/* Float32, all of one state. */
ATTND_API int attnd_module_get(attnd_module* module, const attnd_module_tensor* tensors,
                               int64_t count, attnd_call* call);

#ifdef __cplusplus
}
#endif
