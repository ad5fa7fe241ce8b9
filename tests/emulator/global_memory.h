// GlobalMemory: the buffers that a kernel in the emulator may touch. Every access is checked for
// bounds, alignment, write permission and, in buffers that start without contents, for reads of
// bytes that nothing wrote. One launch at a time; not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace attnd::emulator {

enum class Access : uint8_t { kLoad, kStore, kAtomic };

enum class Contents : uint8_t {
  kConstant,       // initialised, and stores are refused
  kInitialised,    // may be read and written
  kUninitialised,  // may be read only where it was written
};

class GlobalMemory {
 public:
  // `name` appears in messages. The memory outlives this object. Buffers must not overlap.
  void Register(const void* data, int64_t bytes, Contents contents, std::string name);
  void Clear();

  // Empty when the access is legal (and then recorded), else what is wrong with it.
  std::string Check(const void* address, int bytes, Access access);

  // Bytes of the buffer at `data` that nothing wrote; 0 for initialised ones.
  int64_t UnwrittenBytes(const void* data) const;

 private:
  struct Buffer {
    uintptr_t begin, end;
    Contents contents;
    std::string name;
    std::vector<uint8_t> written;  // per byte; empty unless kUninitialised
  };
  Buffer* Find(uintptr_t address);

  std::vector<Buffer> buffers_;  // sorted by begin
  size_t last_hit_ = 0;
};

}  // namespace attnd::emulator
