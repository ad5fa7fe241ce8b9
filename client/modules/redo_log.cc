#include "client/modules/redo_log.h"

#include <utility>

namespace attnd {
namespace {

int64_t BytesOf(const SentPut& put) {
  int64_t bytes = 0;
  for (const SentTensor& tensor : put.tensors) bytes += static_cast<int64_t>(tensor.bytes->size());
  return bytes;
}

int64_t BytesOf(const SentBackward& kept) {
  if (kept.gradients != nullptr) return BytesOf(*kept.gradients);
  const SentForward& forward = *kept.forward;
  return static_cast<int64_t>(forward.x.size() + forward.memory.size() + forward.mask_bits.size() +
                              kept.dy.size());
}

int64_t BytesOf(const StateChange& change) {
  const auto* put = std::get_if<std::shared_ptr<const SentPut>>(&change);
  return put == nullptr ? 0 : BytesOf(**put);
}

}  // namespace

void RedoLog::Begin(uint64_t sequence) {
  entries_.clear();
  bytes_ = 0;
  first_ = present_ = sequence;
}

RedoLog::Entry* RedoLog::Present() {
  if (present_ < first_) return nullptr;
  if (entries_.empty() || entries_.back().sequence != present_) {
    entries_.push_back({.sequence = present_, .backwards = {}, .end = {}});
  }
  return &entries_.back();
}

void RedoLog::Add(SentBackward backward) {
  Entry* entry = Present();
  if (entry == nullptr) return;
  bytes_ += BytesOf(backward);
  entry->backwards.push_back(std::move(backward));
  Trim();
}

void RedoLog::ForgetGradients() {
  Entry* entry = Present();
  if (entry == nullptr) return;
  for (const SentBackward& kept : entry->backwards) bytes_ -= BytesOf(kept);
  entry->backwards.clear();
}

void RedoLog::End(StateChange change) {
  Entry* entry = Present();
  if (entry != nullptr) {
    bytes_ += BytesOf(change);
    entry->end.push_back(std::move(change));
  }
  ++present_;
  Trim();
}

void RedoLog::LosePresent() {
  while (!entries_.empty()) PopFront();
  first_ = present_ + 1;
}

void RedoLog::PopFront() {
  const Entry& entry = entries_.front();
  for (const SentBackward& kept : entry.backwards) bytes_ -= BytesOf(kept);
  for (const StateChange& change : entry.end) bytes_ -= BytesOf(change);
  first_ = entry.sequence + 1;
  entries_.pop_front();
}

void RedoLog::Trim() {
  while (bytes_ > most_bytes_) PopFront();
}

void RedoLog::ForgetBefore(uint64_t sequence) {
  while (!entries_.empty() && entries_.front().sequence < sequence) PopFront();
}

bool RedoLog::CanReplayFrom(uint64_t sequence) const {
  return first_ <= sequence && sequence <= present_;
}

std::vector<RedoLog::Entry> RedoLog::From(uint64_t sequence) const {
  std::vector<Entry> found;
  for (const Entry& entry : entries_) {
    if (entry.sequence >= sequence) found.push_back(entry);
  }
  return found;
}

}  // namespace attnd
