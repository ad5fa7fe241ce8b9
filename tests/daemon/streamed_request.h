// The messages of a streamed call, as generated messages and as they travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "proto/attnd/v1/attention.pb.h"
#include "tests/fixtures/raw_http2.h"

namespace attnd {

inline constexpr int kK = v1::ForwardRequest::kKFieldNumber, kV = v1::ForwardRequest::kVFieldNumber,
                     kQ = v1::ForwardRequest::kQFieldNumber;

// The payloads of a request by field number, in the order in which they travel, taken out of it.
template <class Request>
std::vector<std::pair<int, std::string>> TakePayloads(Request& request) {
  std::vector<std::pair<int, std::string>> payloads;
  const auto* type = request.GetDescriptor();
  for (int number = 15; number <= 31; ++number) {
    const auto* field = type->FindFieldByNumber(number);
    if (field == nullptr) continue;
    std::string bytes = request.GetReflection()->GetString(request, field);
    request.GetReflection()->ClearField(&request, field);
    if (!bytes.empty()) payloads.emplace_back(number, std::move(bytes));
  }
  return payloads;
}

template <class Request>
Request Chunk(int tensor, uint64_t offset, std::string data) {
  Request request;
  request.mutable_chunk()->set_tensor(static_cast<uint32_t>(tensor));
  request.mutable_chunk()->set_offset(offset);
  request.mutable_chunk()->set_data(std::move(data));
  return request;
}
inline v1::ForwardStreamRequest ForwardChunk(int tensor, uint64_t offset, std::string data) {
  return Chunk<v1::ForwardStreamRequest>(tensor, offset, std::move(data));
}

// A message as it travels.
inline std::string Framed(const v1::ForwardStreamRequest& message) {
  const std::string bytes = message.SerializeAsString();
  return RawHttp2::MessagePrefix(static_cast<uint32_t>(bytes.size())) + bytes;
}

inline v1::ForwardStreamRequest HeaderOf(v1::ForwardRequest request) {
  TakePayloads(request);
  v1::ForwardStreamRequest header;
  *header.mutable_header() = std::move(request);
  return header;
}

}  // namespace attnd
