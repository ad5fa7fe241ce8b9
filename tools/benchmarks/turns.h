// Turns: several ways of making a call, timed in turns of 50 so that a busy machine slows them
// alike, beside servers that are processes of their own. One thread.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace attnd {

inline constexpr int kRounds = 40, kCallsATurn = 50;

// A program that serves on an address, ended when this goes.
class ServerProcess {
 public:
  explicit ServerProcess(std::vector<std::string> words);
  ~ServerProcess();
  struct Use {
    double sleeps = 0, cpu_us = 0;
  };
  // Adds up all its threads so far.
  Use UseSoFar() const;

 private:
  const pid_t pid_;
};

// Processor time of the caller's thread so far.
double OwnThreadMicroseconds();

// One way of making the case's call, and what its calls took.
struct Way {
  std::string name;
  std::function<void()> call;
  const ServerProcess* server = nullptr;
  std::vector<double> microseconds;
  double caller_us = 0, server_us = 0, sleeps = 0;  // sums

  void TimedCall();
  void Turn(bool counts);
  double At(double quantile) const;  // once microseconds is sorted
};

// Takes turns and prints a line for each way, under the title. Their times, sorted.
void Compare(const std::string& title, std::vector<Way>& ways);

}  // namespace attnd
