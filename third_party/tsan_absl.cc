// ThreadSanitizer needs to know about absl's Mutex, CondVar, Notification and BlockingCounter,
// whose library Debian builds without instrumentation: without this each field that an absl::Mutex
// guards looks like a race. Each function here stands in front of the library's own (the
// executable's definition wins), says "acquired" or "released", and calls on. The conditions of
// Await and LockWhen are evaluated inside the library, by whichever thread unlocks: what they read
// is not checked. Empty without -fsanitize=thread.
#if defined(__SANITIZE_THREAD__)
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdio>
#include <cstdlib>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace {

struct UncheckedAccesses {
  UncheckedAccesses() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~UncheckedAccesses() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};

void* FindInLibrary(const char* mangled) {
  void* found = dlsym(RTLD_NEXT, mangled);
  if (found != nullptr) return found;
  std::fprintf(stderr, "tsan_absl.cc: this abseil has no %s\n", mangled);
  std::abort();
}

// A member function is a function whose first argument is the object (Itanium C++ ABI).
template <class Result, class... Arguments>
Result CallLibrary(void* function, Arguments... arguments) {
  UncheckedAccesses unchecked;
  return reinterpret_cast<Result (*)(Arguments...)>(function)(arguments...);
}

void Acquired(const void* object) { __tsan_acquire(const_cast<void*>(object)); }
void Released(const void* object) { __tsan_release(const_cast<void*>(object)); }

}  // namespace

// The library's function of this name, looked up once.
#define IN_LIBRARY(name)                                     \
  ([]() -> void* {                                           \
    static void* const function = FindInLibrary("_ZN" name); \
    return function;                                         \
  }())
#define ABSL_NAME "4absl7debian3"

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  CallLibrary<void>(IN_LIBRARY(ABSL_NAME "5Mutex4LockEv"), this);
  Acquired(this);
}

bool Mutex::TryLock() {
  bool locked = CallLibrary<bool>(IN_LIBRARY(ABSL_NAME "5Mutex7TryLockEv"), this);
  if (locked) Acquired(this);
  return locked;
}

void Mutex::Unlock() {
  Released(this);
  CallLibrary<void>(IN_LIBRARY(ABSL_NAME "5Mutex6UnlockEv"), this);
}

void Mutex::ReaderLock() {
  CallLibrary<void>(IN_LIBRARY(ABSL_NAME "5Mutex10ReaderLockEv"), this);
  Acquired(this);
}

void Mutex::ReaderUnlock() {
  Released(this);
  CallLibrary<void>(IN_LIBRARY(ABSL_NAME "5Mutex12ReaderUnlockEv"), this);
}

void Mutex::LockWhen(const Condition& condition) {
  CallLibrary<void>(IN_LIBRARY(ABSL_NAME "5Mutex8LockWhenERKNS0_9ConditionE"), this, &condition);
  Acquired(this);
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, absl::Time deadline) {
  bool met = CallLibrary<bool>(
      IN_LIBRARY(ABSL_NAME "5Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE"), this,
      &condition, deadline);
  Acquired(this);
  return met;
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, absl::Duration timeout) {
  bool met = CallLibrary<bool>(
      IN_LIBRARY(ABSL_NAME "5Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE"), this,
      &condition, timeout);
  Acquired(this);
  return met;
}

void Mutex::Await(const Condition& condition) {
  Released(this);
  CallLibrary<void>(IN_LIBRARY(ABSL_NAME "5Mutex5AwaitERKNS0_9ConditionE"), this, &condition);
  Acquired(this);
}

bool Mutex::AwaitWithDeadline(const Condition& condition, absl::Time deadline) {
  Released(this);
  bool met = CallLibrary<bool>(
      IN_LIBRARY(ABSL_NAME "5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE"), this,
      &condition, deadline);
  Acquired(this);
  return met;
}

bool Mutex::AwaitWithTimeout(const Condition& condition, absl::Duration timeout) {
  Released(this);
  bool met = CallLibrary<bool>(
      IN_LIBRARY(ABSL_NAME "5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE"), this,
      &condition, timeout);
  Acquired(this);
  return met;
}

void CondVar::Wait(Mutex* mutex) {
  Released(mutex);
  CallLibrary<void>(IN_LIBRARY(ABSL_NAME "7CondVar4WaitEPNS0_5MutexE"), this, mutex);
  Acquired(mutex);
}

bool CondVar::WaitWithDeadline(Mutex* mutex, absl::Time deadline) {
  Released(mutex);
  bool timed_out =
      CallLibrary<bool>(IN_LIBRARY(ABSL_NAME "7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE"),
                        this, mutex, deadline);
  Acquired(mutex);
  return timed_out;
}

bool CondVar::WaitWithTimeout(Mutex* mutex, absl::Duration timeout) {
  Released(mutex);
  bool timed_out = CallLibrary<bool>(
      IN_LIBRARY(ABSL_NAME "7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE"), this, mutex,
      timeout);
  Acquired(mutex);
  return timed_out;
}

// HasBeenNotified() is inline: it acquires the flag, which stands behind the mutex.
void Notification::Notify() {
  Released(this);
  Released(reinterpret_cast<char*>(this) + sizeof(Mutex));
  CallLibrary<void>(IN_LIBRARY(ABSL_NAME "12Notification6NotifyEv"), this);
}

void Notification::WaitForNotification() const {
  CallLibrary<void>(IN_LIBRARY("K" ABSL_NAME "12Notification19WaitForNotificationEv"), this);
  Acquired(this);
}

bool Notification::WaitForNotificationWithTimeout(absl::Duration timeout) const {
  bool notified = CallLibrary<bool>(
      IN_LIBRARY("K" ABSL_NAME "12Notification30WaitForNotificationWithTimeoutENS0_8DurationE"),
      this, timeout);
  if (notified) Acquired(this);
  return notified;
}

bool Notification::WaitForNotificationWithDeadline(absl::Time deadline) const {
  bool notified = CallLibrary<bool>(
      IN_LIBRARY("K" ABSL_NAME "12Notification31WaitForNotificationWithDeadlineENS0_4TimeE"), this,
      deadline);
  if (notified) Acquired(this);
  return notified;
}

bool BlockingCounter::DecrementCount() {
  Released(this);
  return CallLibrary<bool>(IN_LIBRARY(ABSL_NAME "15BlockingCounter14DecrementCountEv"), this);
}

void BlockingCounter::Wait() {
  CallLibrary<void>(IN_LIBRARY(ABSL_NAME "15BlockingCounter4WaitEv"), this);
  Acquired(this);
}

ABSL_NAMESPACE_END
}  // namespace absl
#endif  // __SANITIZE_THREAD__
