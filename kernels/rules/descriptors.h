// A block's problem and sequence, copied next to it: loops that look something up then wait for
// shared memory, not for the L2. Loads of four words of either cost sm70's backward at D 64 two
// points if they fall apart. Errors: none.
#pragma once

#include "kernels/ptx/instructions.h"
#include "kernels/rules/params.h"

namespace attnd {

struct alignas(16) Descriptors {
  ProblemDesc problem;
  alignas(16) SequenceDesc sequence;
};
ATTN_HD void CopyWords(const void* from, void* to, int bytes, int thread, int threads) {
  for (int n = thread * 4; n < bytes; n += threads * 4) {
    ptx::StoreShared32(static_cast<char*>(to) + n,
                       ptx::LoadConstant32(static_cast<const char*>(from) + n));
  }
}
// By all threads of the block; a barrier has to follow.
ATTN_HD void BringDescriptors(const LaunchParams& params, const TileWork& tile, int thread,
                              int threads, Descriptors& to) {
  const ProblemDesc& problem = params.problems[tile.problem];
  CopyWords(&problem, &to.problem, sizeof(ProblemDesc), thread, threads);
  CopyWords(&problem.sequences[tile.batch], &to.sequence, sizeof(SequenceDesc), thread, threads);
}

}  // namespace attnd
