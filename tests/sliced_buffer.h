// A received message in the slices in which gRPC may hand it over.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace attnd {

// Each piece is a slice of its own. A buffer would join those of a few bytes, which lie within
// their slices; these lie elsewhere.
inline grpc::ByteBuffer InSlices(std::vector<std::string> pieces) {
  std::vector<grpc::Slice> slices;
  for (std::string& piece : pieces) {
    auto* kept = new std::string(std::move(piece));
    slices.emplace_back(
        kept->data(), kept->size(), [](void* k) { delete static_cast<std::string*>(k); }, kept);
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// In slices of `slice_bytes`.
inline grpc::ByteBuffer InSlicesOf(const std::string& message, size_t slice_bytes) {
  std::vector<std::string> pieces;
  for (size_t at = 0; at < message.size(); at += slice_bytes) {
    pieces.push_back(message.substr(at, slice_bytes));
  }
  return InSlices(std::move(pieces));
}

}  // namespace attnd
