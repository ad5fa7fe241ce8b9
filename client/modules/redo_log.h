// RedoLog: the calls that made a module's state what it is, as far as no server keeps that state
// for good: replayed in order they make it again, bit for bit, since state(n + 1) = f(state(n),
// calls).
//
//     Register anew → sequence s of what the server found → From(s): Backward and Step of s, of
//     s + 1, ... up to the present
//
// Beyond `most_bytes` the oldest sequences are forgotten first; CanReplayFrom then says no for
// them. One thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "client/modules/kept_bytes.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

// Keeps a Forward's arguments: all that Backward needs where its activations are lost.
struct SentForward {
  v1::ModuleForwardHeader header;  // without token
  KeptBytes mask_bits, memory, x;
};

struct SentTensor {
  v1::TensorHeader header;
  std::shared_ptr<const std::string> bytes;
};
struct SentPut {
  std::vector<SentTensor> tensors;
  v1::PutTensorsCommit commit;
};

// A micro-batch: a Backward, or a put of gradients, which has no forward and no dy.
struct SentBackward {
  std::shared_ptr<const SentForward> forward;
  KeptBytes dy;
  uint32_t micro_batch = 0;
  std::shared_ptr<const SentPut> gradients;  // null: of a Backward
};

// Makes the next sequence's state of the one that it names.
using StateChange = std::variant<v1::StepRequest, std::shared_ptr<const SentPut>>;

class RedoLog {
 public:
  // Holds one sequence: its gradients, and what ended it. The present one has no end yet.
  struct Entry {
    uint64_t sequence = 0;
    std::vector<SentBackward> backwards;
    std::vector<StateChange> end;  // none or one
  };

  explicit RedoLog(int64_t most_bytes) : most_bytes_(most_bytes) {}

  // Forgets everything; the state of `sequence` is what a server keeps.
  void Begin(uint64_t sequence);
  void Add(SentBackward backward);  // to the present sequence
  void ForgetGradients();           // of the present sequence: they will be cleared
  void End(StateChange change);     // the next sequence is the present one then
  void LosePresent();               // calls of this sequence are not here, nor will be
  // A restart would find this state: what came before it is not needed.
  void ForgetBefore(uint64_t sequence);

  bool CanReplayFrom(uint64_t sequence) const;
  // Entries from that sequence on; CanReplayFrom it.
  std::vector<Entry> From(uint64_t sequence) const;
  int64_t bytes() const { return bytes_; }

 private:
  Entry* Present();  // null: it has been forgotten in part
  void Trim();
  void PopFront();

  const int64_t most_bytes_;
  uint64_t first_ = 0;    // can be replayed from here on
  uint64_t present_ = 0;  // sequence
  std::deque<Entry> entries_;
  int64_t bytes_ = 0;
};

}  // namespace attnd
