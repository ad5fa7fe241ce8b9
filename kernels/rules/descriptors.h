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
// All threads of the block call it; a barrier has to follow.
ATTN_HD void BringDescriptors(const LaunchParams& params, const TileWork& tile, int thread,
                              int threads, Descriptors& to) {
  const ProblemDesc& problem = params.problems[tile.problem];
  CopyWords(&problem, &to.problem, sizeof(ProblemDesc), thread, threads);
  CopyWords(&problem.sequences[tile.batch], &to.sequence, sizeof(SequenceDesc), thread, threads);
}

// A block's, brought anew where its tiles come to another problem or sequence.
class KeptDescriptors {
 public:
  ATTN_HD explicit KeptDescriptors(Descriptors& kept) : kept_(kept) {}
  // All threads of the block call it.
  ATTN_HD const Descriptors& Of(const LaunchParams& params, const TileWork& tile, int thread,
                                int threads) {
    if (tile.problem == problem_ && tile.batch == batch_) return kept_;
    problem_ = tile.problem;
    batch_ = tile.batch;
    ptx::SyncThreads();  // the tile before is done
    BringDescriptors(params, tile, thread, threads, kept_);
    ptx::SyncThreads();
    return kept_;
  }

 private:
  Descriptors& kept_;
  int problem_ = -1, batch_ = -1;
};

}  // namespace attnd
