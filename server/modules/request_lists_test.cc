// Each list of each request, lengthened by the smallest entries until the request has 64 KiB: what
// decoding it takes beyond the room that it asks for. The requests are those of the protos, so that
// a new list is tried too.
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <time.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/module.pb.h"
#include "server/modules/payloads.h"
#include "server/wire/decode_small.h"

namespace attnd {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kRequestBytes = 64 << 10;
constexpr int kMostDepth = 6;  // of lists within messages: masks hold masks

int64_t HeapBytes() {
  const struct mallinfo2 heap = mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
}

double ThreadSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

using Visit = std::function<void(const std::string& path, const std::string& bytes)>;

void AppendVarint(uint64_t value, std::string& bytes) {
  for (; value >= 128; value /= 128) bytes.push_back(static_cast<char>(value % 128 + 128));
  bytes.push_back(static_cast<char>(value));
}

void AppendTag(const FieldDescriptor& field, int wire_type, std::string& bytes) {
  AppendVarint(static_cast<uint64_t>(field.number()) << 3 | static_cast<uint64_t>(wire_type),
               bytes);
}

// The smallest entries of a list, as many as fit.
std::string Entries(const FieldDescriptor& list, size_t most) {
  std::string entry, bytes;
  if (list.is_packable()) {
    const bool is_varint = list.type() != FieldDescriptor::TYPE_FLOAT &&
                           list.type() != FieldDescriptor::TYPE_DOUBLE &&
                           list.type() != FieldDescriptor::TYPE_FIXED32 &&
                           list.type() != FieldDescriptor::TYPE_FIXED64;
    const bool is_enum = list.type() == FieldDescriptor::TYPE_ENUM;
    AppendTag(list, 2, bytes);
    AppendVarint(most - 8, bytes);
    return bytes + std::string(most - 8, is_varint && is_enum ? '\1' : '\0');
  }
  AppendTag(list, 2, entry);
  entry.push_back('\0');
  while (bytes.size() + entry.size() <= most) bytes += entry;
  return bytes;
}

// Messages of `type`, each with one of its lists, at any depth, that long.
void ForEachList(const Descriptor& type, const std::string& path, int depth, const Visit& visit) {
  if (depth > kMostDepth) return;
  for (int n = 0; n < type.field_count(); ++n) {
    const FieldDescriptor& field = *type.field(n);
    const std::string here = absl::StrCat(path, ".", field.name());
    if (field.is_repeated()) visit(here, Entries(field, kRequestBytes - 64));
    if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    ForEachList(*field.message_type(), here, depth + 1,
                [&](const std::string& inner, const std::string& bytes) {
                  std::string outer;
                  AppendTag(field, 2, outer);
                  AppendVarint(bytes.size(), outer);
                  visit(inner, outer + bytes);
                });
  }
}

// A list of the smallest entries may take so much beside its objects, for each byte of the request:
// numbers of one byte. A machine that is busy may take its time.
constexpr int64_t kMostOfByte = 16;
constexpr double kMostSeconds = 0.1;  // of the thread; 3 ms are usual

TEST(RequestLists, TakeMemoryAndTimeInProportionToTheRequest) {
  int lists = 0;
  for (const google::protobuf::FileDescriptor* file :
       {v1::ForwardRequest::descriptor()->file(), v1::PutTensorsHeader::descriptor()->file()}) {
    for (int m = 0; m < file->service(0)->method_count(); ++m) {
      const Descriptor& type = *file->service(0)->method(m)->input_type();
      const Message& prototype =
          *google::protobuf::MessageFactory::generated_factory()->GetPrototype(&type);
      ForEachList(type, type.name(), 0, [&](const std::string& path, const std::string& bytes) {
        ++lists;
        EXPECT_LE(bytes.size(), kRequestBytes) << path;
        const std::unique_ptr<Message> request(prototype.New());
        const grpc::Slice slice(bytes);
        const MessageBytes message(grpc::ByteBuffer(&slice, 1));
        const int64_t before = HeapBytes();
        const double begun = ThreadSeconds();
        int64_t objects = 0;
        const absl::Status status = DecodePart(
            message, {0, message.size()}, "", kMaxModuleString,
            [&](int64_t object_bytes) {
              EXPECT_LT(HeapBytes() - before, 1 << 10) << path;
              objects = object_bytes;
              return absl::OkStatus();
            },
            *request);
        EXPECT_LT(ThreadSeconds() - begun, kMostSeconds) << path;
        EXPECT_LE(HeapBytes() - before, objects + kMostOfByte * message.size()) << path;
      });
    }
  }
  EXPECT_GT(lists, 100);
}

TEST(RequestLists, OfUnknownFieldsTakeNoMemory) {
  for (const char* entry : {"\x48\x01", "\x4a"}) {  // numbers; empty strings
    std::string bytes;
    while (bytes.size() < kRequestBytes) bytes.append(entry, 2);
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    const int64_t before = HeapBytes();
    EXPECT_TRUE(CheckEmpty(request).ok());
    EXPECT_LT(HeapBytes() - before, 1 << 10);
  }
}

}  // namespace
}  // namespace attnd
