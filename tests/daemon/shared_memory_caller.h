// A caller on the same host shares memory with a daemon, in the plainest form: a region, a control
// connection, and a request whose tensors lie in the region. Tests break each of its steps.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/check.h"
#include "net/descriptor_socket.h"
#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/shared_memory.pb.h"

namespace attnd {

class TestRegion {
 public:
  explicit TestRegion(int64_t size) : size_(size), fd_(memfd_create("test", MFD_ALLOW_SEALING)) {
    CHECK(ftruncate(fd_.get(), size) == 0 && fallocate(fd_.get(), 0, 0, size) == 0);
    CHECK(fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    CHECK(data != MAP_FAILED);
    data_ = static_cast<char*>(data);
    memcpy(data_, "0123456789abcdef", 16);
  }
  ~TestRegion() { munmap(data_, size_); }

  char* data() const { return data_; }
  int64_t size() const { return size_; }
  int fd() const { return fd_.get(); }
  absl::string_view proof() const { return {data_, 16}; }

 private:
  const int64_t size_;
  FileDescriptor fd_;
  char* data_;
};

class ControlSocket {
 public:
  explicit ControlSocket(const std::string& path) : fd_(socket(AF_UNIX, SOCK_SEQPACKET, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, path.data(), path.size());
    CHECK(connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  }

  int fd() const { return fd_.get(); }
  bool Send(const v1::SharedMemoryRequest& request, int descriptor = -1) {
    return SendPacket(fd_.get(), request.SerializeAsString(), descriptor, true) ==
           SocketResult::kDone;
  }
  // False: the daemon has closed the connection.
  bool Receive(v1::SharedMemoryReply& reply) {
    Packet packet;
    return ReceivePacket(fd_.get(), true, packet) == SocketResult::kDone &&
           reply.ParseFromString(packet.bytes);
  }
  v1::SharedMemoryReply Add(const TestRegion& region, const std::string& authorization = "") {
    v1::SharedMemoryRequest request;
    request.mutable_add_region()->set_size(region.size());
    request.mutable_add_region()->set_proof(std::string(region.proof()));
    request.mutable_add_region()->set_authorization(authorization);
    v1::SharedMemoryReply reply;
    CHECK(Send(request, region.fd()) && Receive(reply));
    return reply;
  }
  bool AskEndOf(uint64_t use) {
    v1::SharedMemoryRequest request;
    request.mutable_end_use()->set_use(use);
    return Send(request);
  }

 private:
  FileDescriptor fd_;
};

// Lays tensors end to end in a region, from its second page on, and lists them in a SharedMemory.
class SharedLayout {
 public:
  static constexpr int64_t kGap = 64;  // filled with kCanary behind each tensor
  static constexpr char kCanary = 0x5a;

  SharedLayout(const TestRegion& region, const std::string& token, uint64_t use) : region_(region) {
    memset(region.data() + 4096, kCanary, region.size() - 4096);
    memory_.add_region(token);
    memory_.set_use(use);
  }

  void AddInput(v1::TensorName name, std::string* payload) {
    memcpy(Place(name, payload->size()), payload->data(), payload->size());
    payload->clear();
  }
  void AddOutput(v1::TensorName name, int64_t size) { Place(name, size); }

  const v1::SharedMemory& memory() const { return memory_; }
  // The bytes of a tensor now.
  std::string Read(v1::TensorName name) const {
    for (const v1::SharedTensor& tensor : memory_.tensor()) {
      if (tensor.name() == name) return {region_.data() + tensor.offset(), tensor.size()};
    }
    return "";
  }
  // Whether no byte between and behind the tensors has changed.
  bool GapsAreUntouched() const {
    std::string used(region_.size(), '\0');
    for (const v1::SharedTensor& tensor : memory_.tensor()) {
      std::fill_n(used.begin() + tensor.offset(), tensor.size(), '\1');
    }
    for (int64_t n = 4096; n < region_.size(); ++n) {
      if (used[n] == 0 && region_.data()[n] != kCanary) return false;
    }
    return true;
  }

 private:
  char* Place(v1::TensorName name, int64_t size) {
    v1::SharedTensor* tensor = memory_.add_tensor();
    tensor->set_name(name);
    tensor->set_offset(next_);
    tensor->set_size(size);
    char* data = region_.data() + next_;
    next_ += (size + 63) / 64 * 64 + kGap;
    CHECK(next_ <= region_.size());
    return data;
  }

  const TestRegion& region_;
  v1::SharedMemory memory_;
  int64_t next_ = 4096;
};

}  // namespace attnd
