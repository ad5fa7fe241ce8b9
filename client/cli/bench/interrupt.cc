#include "client/cli/bench/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <iostream>
#include <thread>
#include <utility>

namespace attnd {
namespace {

constexpr int kExitInterrupted = 130;  // as shells have it: 128 + SIGINT

}  // namespace

void OnInterrupt(std::function<void()> last_words) {
  sigset_t interrupt;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt, nullptr);
  std::thread([interrupt, last_words = std::move(last_words)] {
    int signal = 0;
    while (sigwait(&interrupt, &signal) != 0) {
    }
    pthread_sigmask(SIG_UNBLOCK, &interrupt, nullptr);
    last_words();
    std::cout.flush();
    _exit(kExitInterrupted);
  }).detach();
}

}  // namespace attnd
