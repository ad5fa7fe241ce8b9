// CHECK and DCHECK: our own bugs end the process with file, line and the condition. Nothing that a
// client sends can reach one: what comes from outside is answered by a Status.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace attnd {

// Collects the streamed message of a failed CHECK and aborts when it goes out of scope. Any thread.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition) {
    message_ << file << ":" << line << ": CHECK failed: " << condition << " ";
  }
  [[noreturn]] ~CheckFailure() {
    std::fprintf(stderr, "%s\n", message_.str().c_str());
    std::abort();
  }
  std::ostream& stream() { return message_; }

 private:
  std::ostringstream message_;
};

}  // namespace attnd

#define CHECK(condition) \
  while (!(condition)) [[unlikely]] ::attnd::CheckFailure(__FILE__, __LINE__, #condition).stream()

#ifdef NDEBUG
#define DCHECK(condition) \
  while (false) CHECK(condition)
#else
#define DCHECK(condition) CHECK(condition)
#endif
