// TensorJob: attention on the tensors of a safetensors file: the file's tensors become a Problem
// and its inputs, the results become tensors again.
//
//   inputs   q, k, v [batch, heads, length, dim] in the layout's order, packed ones of rank 3;
//            optional: bias (rank 4, broadcast), mask (BOOL or U8, rank 4, broadcast),
//            kv_lengths, offsets, cu_seqlens_q, cu_seqlens_k (I32 or I64), alibi_slopes,
//            sink_logits (F32). With dout: backward too, from o and lse if they are there, and
//            dlse.
//   outputs  o, lse; dq, dk, dv, and dbias, dsink where they apply
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "base/safetensors.h"
#include "client/attention_client.h"
#include "client/cli/problem_flags.h"

namespace attnd {

class TensorJob {
 public:
  // `file` outlives it. INVALID_ARGUMENT naming the tensor or flag.
  static absl::StatusOr<TensorJob> Make(const SafetensorsFile& file, const ProblemFlags& flags);

  // Forward unless the file has o and lse and only gradients are missing; backward with dout.
  absl::Status Run(AttentionClient& client, const CallOptions& options);

  std::map<std::string, StoredTensor> Results() const;
  const Problem& problem() const { return p_; }
  bool has_backward() const { return file_->Find("dout") != nullptr; }
  const CallReceipt& receipt() const { return receipt_; }  // of the last call

 private:
  explicit TensorJob(const SafetensorsFile& file) : file_(&file) {}
  absl::Status ReadOffsets();
  absl::Status ReadSizes();
  absl::Status ReadLists();
  absl::Status ReadMaskAndBias();
  absl::Status CheckTensor(const std::string& name, const std::vector<int64_t>& shape,
                           const std::string& dtype) const;
  absl::Status CheckInputs() const;
  const void* Data(const std::string& name) const;  // null: not in the file
  std::vector<std::byte>& NewResult(const std::string& name, const std::string& dtype,
                                    const std::vector<int64_t>& shape);
  absl::Status RunForward(AttentionClient& client, const CallOptions& options);
  absl::Status RunBackward(AttentionClient& client, const CallOptions& options);
  std::vector<int64_t> LseShape() const;

  const SafetensorsFile* file_;
  Problem p_;
  std::vector<uint8_t> mask_bits_;
  struct Result {
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<std::byte> bytes;
  };
  std::map<std::string, Result> results_;
  CallReceipt receipt_;
};

}  // namespace attnd
