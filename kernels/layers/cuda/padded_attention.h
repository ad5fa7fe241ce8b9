// Prepares a call of attention so that the engine can run it where its tensors lie: rows of whole
// 16 bytes, and groups of sequences whose workspace is bounded by their rows. One call at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/problem.h"
#include "attention/shard.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/layout/staging.h"
#include "kernels/layers/executor/module_device.h"

namespace attnd {

// Bounds the bytes of all problems with at most the rows and keys of this one sequence: the padded
// rows, and an arena that any group fits.
int64_t PaddedBytes(const Problem& one_sequence, Direction direction);
int64_t GroupBytes(const cuda::CudaBackend& engine, const Problem& one_sequence,
                   Direction direction);

// Runs of sequences, told by the problem alone. A group's dQ sums, 64 rows a step, take no more
// than one sequence of all rows would.
std::vector<ShardRange> GroupsOf(const Problem& problem);

// `call` of the whole problem, cut to a group whose problem is `part`. lse of packed sequences has
// its groups end to end.
ForwardCall CallOfGroup(const ForwardCall& call, const Problem& part, const ShardRange& group);
BackwardCall CallOfGroup(const BackwardCall& call, const Problem& part, const ShardRange& group);

// Tensors of one call: as they lie, where their rows are whole, else padded copies in its
// workspace.
class PaddedRows {
 public:
  enum Kind : uint8_t { kQuery, kKey, kValue, kOutput };

  // Both outlive the object.
  PaddedRows(ModuleDevice& device, const Problem& problem, std::byte* workspace)
      : device_(device), problem_(problem), begin_(workspace), next_(workspace) {}

  const void* In(const void* tensor, Kind kind);
  void* Out(void* tensor, Kind kind);
  // Copies what kernels have written to where it belongs.
  void Return();
  // The workspace that is left, and the bytes of it that are used.
  std::byte* next() const { return next_; }
  int64_t used() const { return next_ - begin_; }

 private:
  struct Copied {
    void* tensor;
    std::byte* padded;
    cuda::RowShape shape;
  };
  std::byte* Take(const cuda::RowShape& shape);

  ModuleDevice& device_;
  const Problem& problem_;
  std::byte* const begin_;
  std::byte* next_;
  std::vector<Copied> outputs_;
};

}  // namespace attnd
