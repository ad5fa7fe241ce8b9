// null_attnd: attnd with every flag of attnd and an engine that computes nothing: what is left is
// the wire. For benchmarks only.
//
//     null_attnd --listen 127.0.0.1:0 --port_file F ...      ends at SIGTERM
//     ATTND_NULL_FLOPS=1e12 null_attnd ...                   as long as a device of this rate needs
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/cpu/cpu_backend.h"
#include "net/process_tuning.h"
#include "server/app/attnd_server.h"
#include "server/app/flags.h"
#include "tools/benchmarks/null_backend.h"

namespace attnd {
namespace {

void WritePort(const std::string& path, const std::string& port) {
  if (path.empty()) return;
  std::ofstream(path + ".new") << port << "\n";
  CHECK(std::rename((path + ".new").c_str(), path.c_str()) == 0) << path;
}

int Serve(const ServerOptions& options) {
  RealClock clock;
  Logger log(stderr, options.log_format, options.log_level);
  auto backend = std::make_unique<NullBackend>(MakeCpuBackend({}));
  NullBackend& engine = *backend;
  auto server = AttndServer::Start(options, std::move(backend), clock, log);
  CHECK(server.ok()) << server.status().message();
  const char* flops = std::getenv("ATTND_NULL_FLOPS");
  engine.StopComputing(flops == nullptr ? 0 : std::atof(flops));
  const std::string& address = (*server)->addresses().front();
  WritePort(options.metrics_port_file, std::to_string((*server)->metrics_port()));
  WritePort(options.port_file, address.substr(address.rfind(':') + 1));
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  int received = 0;
  sigwait(&signals, &received);
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  auto flags = attnd::ParseFlags(argc, argv, "null", std::cout);
  CHECK(flags.ok()) << flags.status().message();
  if (flags->action != attnd::FlagAction::kServe) return 0;
  attnd::TuneForTransport();
  return attnd::Serve(flags->options);
}
