// Symbols: functions of a library that was opened at run time. One thread.
#pragma once

#include <dlfcn.h>

#include <string>

namespace attnd {

// Looks symbols up in turn and remembers the first that is missing.
class Symbols {
 public:
  // `library`: dlopen's.
  explicit Symbols(void* library) : library_(library) {}

  template <class Function>
  void Find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr && missing_.empty()) missing_ = name;
  }
  bool Has(const char* name) const { return dlsym(library_, name) != nullptr; }
  const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

}  // namespace attnd
