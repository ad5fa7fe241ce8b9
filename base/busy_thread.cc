#include "base/busy_thread.h"

#include <sys/resource.h>

#include "absl/time/clock.h"

namespace attnd {

ThreadUse ThreadUse::OfTheCaller() {
  rusage use;
  getrusage(RUSAGE_THREAD, &use);
  ThreadUse now = {.at = absl::GetCurrentTimeNanos(), .sleeps = use.ru_nvcsw};
  for (const timeval& part : {use.ru_utime, use.ru_stime}) {
    now.cpu += (part.tv_sec * 1'000'000 + part.tv_usec) * 1000;
  }
  return now;
}

bool BusyThread::IsBusy(const ThreadUse& now) {
  const int64_t ran = now.cpu - slept_.cpu;
  const bool slept = now.sleeps != slept_.sleeps;
  const bool had_core = now.at - slept_.at <= ran + ran / 4;
  if (slept || ran >= kBusy) slept_ = now;
  return !slept && ran >= kBusy && had_core;
}

}  // namespace attnd
