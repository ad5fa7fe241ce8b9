#include "tests/emulator/global_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"

namespace attnd::emulator {
namespace {

const char* NameOf(Access access) {
  switch (access) {
    case Access::kLoad:
      return "load";
    case Access::kStore:
      return "store";
    case Access::kAtomic:
      return "atomic";
  }
  return "?";
}

}  // namespace

void GlobalMemory::Register(const void* data, int64_t bytes, Contents contents, std::string name) {
  if (bytes == 0) return;
  auto begin = reinterpret_cast<uintptr_t>(data);
  Buffer buffer{begin, begin + bytes, contents, std::move(name), {}};
  if (contents == Contents::kUninitialised) buffer.written.resize(bytes);
  auto at = std::upper_bound(buffers_.begin(), buffers_.end(), begin,
                             [](uintptr_t value, const Buffer& b) { return value < b.begin; });
  CHECK(at == buffers_.end() || buffer.end <= at->begin) << buffer.name << " overlaps " << at->name;
  CHECK(at == buffers_.begin() || (at - 1)->end <= begin)
      << buffer.name << " overlaps " << (at - 1)->name;
  buffers_.insert(at, std::move(buffer));
  last_hit_ = 0;
}

void GlobalMemory::Clear() { buffers_.clear(); }

GlobalMemory::Buffer* GlobalMemory::Find(uintptr_t address) {
  if (last_hit_ < buffers_.size() && buffers_[last_hit_].begin <= address &&
      address < buffers_[last_hit_].end) {
    return &buffers_[last_hit_];
  }
  auto at = std::upper_bound(buffers_.begin(), buffers_.end(), address,
                             [](uintptr_t value, const Buffer& b) { return value < b.begin; });
  if (at == buffers_.begin()) return nullptr;
  last_hit_ = at - buffers_.begin() - 1;
  return &buffers_[last_hit_];
}

std::string GlobalMemory::Check(const void* pointer, int bytes, Access access) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address % bytes != 0) {
    return absl::StrFormat("misaligned global %s of %d bytes at %#x", NameOf(access), bytes,
                           address);
  }
  Buffer* buffer = Find(address);
  if (buffer == nullptr) {
    return absl::StrFormat("global %s of %d bytes at %#x, before every buffer", NameOf(access),
                           bytes, address);
  }
  auto offset = static_cast<int64_t>(address - buffer->begin);
  if (address + bytes > buffer->end) {
    return absl::StrFormat("global %s of %d bytes at offset %d of `%s`, which has %d bytes",
                           NameOf(access), bytes, offset, buffer->name,
                           static_cast<int64_t>(buffer->end - buffer->begin));
  }
  if (access != Access::kLoad && buffer->contents == Contents::kConstant) {
    return absl::StrCat("global ", NameOf(access), " at offset ", offset, " of constant `",
                        buffer->name, "`");
  }
  if (buffer->written.empty()) return "";
  uint8_t* written = buffer->written.data() + offset;
  if (access != Access::kStore && std::memchr(written, 0, bytes) != nullptr) {
    return absl::StrCat("global ", NameOf(access), " of ", bytes, " bytes at offset ", offset,
                        " of `", buffer->name, "`, which nothing wrote");
  }
  std::memset(written, 1, bytes);
  return "";
}

int64_t GlobalMemory::UnwrittenBytes(const void* data) const {
  auto begin = reinterpret_cast<uintptr_t>(data);
  for (const Buffer& buffer : buffers_) {
    if (buffer.begin == begin) {
      return std::count(buffer.written.begin(), buffer.written.end(), uint8_t{0});
    }
  }
  CHECK(false) << "no buffer begins there";
  return 0;
}

}  // namespace attnd::emulator
