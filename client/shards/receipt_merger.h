// ReceiptMerger: the receipts of a call's shards as one. Not thread-safe: CallRunner holds a lock.
#pragma once

#include "client/shards/shard_receipt.h"
#include "client/types/call_receipt.h"

namespace attnd {

class ReceiptMerger {
 public:
  void Add(const ShardReceipt& shard);
  CallReceipt& receipt() { return receipt_; }

 private:
  CallReceipt receipt_;
  bool first_ = true;
};

}  // namespace attnd
