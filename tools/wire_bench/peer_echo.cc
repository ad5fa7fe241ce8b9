// peer_echo: what other ways of moving a tensor there and back give, for compare.py:
//
//   peer_echo stub serve PORT_FILE          gRPC's generated stub, payloads as `bytes` in
//   std::string
//   peer_echo raw serve PORT_FILE           plain TCP sockets, both directions at once
//   peer_echo tensors serve PORT_FILE       the same from and to whole tensors in memory, as a
//                                           daemon and its caller have them: the least for sockets
//   peer_echo forward serve PORT_FILE       as tensors; of three pieces one goes back
//   peer_echo stub|raw|tensors|forward call PORT MIB CONNECTIONS DEPTH SECONDS
//                                           prints GB/s back and the CPU seconds of this process
//
// A server ends with SIGTERM. stub keeps DEPTH calls in flight on each connection; raw streams.
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "net/process_tuning.h"
#include "proto/attnd/v1/attention.grpc.pb.h"

namespace attnd {
namespace {

using Clock = std::chrono::steady_clock;

struct Load {
  int port = 0;
  int64_t bytes = 0;
  int connections = 1, depth = 1;
  double seconds = 1;
};

// The first half second is not counted.
struct Window {
  explicit Window(double seconds)
      : begin(Clock::now() + std::chrono::milliseconds(500)),
        end(begin +
            std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}
  bool Over() const { return Clock::now() >= end; }
  bool Counts() const { return Clock::now() >= begin && !Over(); }
  const Clock::time_point begin, end;
};

void WritePort(const std::string& path, int port) {
  std::ofstream(path + ".new") << port << "\n";
  CHECK(std::rename((path + ".new").c_str(), path.c_str()) == 0) << path;
}

// ---- gRPC's generated stub.

class EchoService final : public v1::Attention::Service {
  grpc::Status Forward(grpc::ServerContext*, const v1::ForwardRequest* request,
                       v1::ForwardResponse* reply) override {
    reply->set_o(request->q());
    return grpc::Status::OK;
  }
};

void ServeStub(const std::string& port_file) {
  EchoService service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(&service);
  auto server = builder.BuildAndStart();
  WritePort(port_file, port);
  server->Wait();
}

int64_t CallStub(const Load& load) {
  Window window(load.seconds);
  std::atomic<int64_t> echoes{0};
  std::vector<std::thread> threads;
  for (int n = 0; n < load.connections; ++n) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    arguments.SetMaxReceiveMessageSize(-1);
    auto channel = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(load.port),
                                             grpc::InsecureChannelCredentials(), arguments);
    for (int d = 0; d < load.depth; ++d) {
      threads.emplace_back([&, channel] {
        auto stub = v1::Attention::NewStub(channel);
        v1::ForwardRequest request;
        request.set_q(std::string(static_cast<size_t>(load.bytes), 'q'));
        while (!window.Over()) {
          grpc::ClientContext context;
          v1::ForwardResponse reply;
          CHECK(stub->Forward(&context, request, &reply).ok());
          if (window.Counts()) ++echoes;
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  return echoes * load.bytes;
}

// ---- Plain sockets: whatever comes goes back, 1 MiB at a time.

constexpr size_t kPieceBytes = 1 << 20;

bool WriteAll(int fd, const char* data, size_t size) {
  while (size > 0) {
    ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

// The memory of one end of a connection, of which each piece is used in its turn: 1 MiB that stays
// in a core's cache, or several tensors, none of which does.
class Pieces {
 public:
  explicit Pieces(int64_t bytes) : memory_(static_cast<size_t>(bytes), 'q') {}
  char* Next() {
    at_ = (at_ + kPieceBytes) % memory_.size();
    return memory_.data() + at_;
  }

 private:
  std::vector<char> memory_;
  size_t at_ = 0;
};

bool ReadAll(int fd, char* data, size_t size) {
  for (ssize_t got; size > 0; data += got, size -= static_cast<size_t>(got)) {
    if ((got = recv(fd, data, size, 0)) <= 0) return false;
  }
  return true;
}

// Each way of one end, two tensors of 8 MiB in turns.
constexpr int64_t kTensorsBytes = int64_t{16} << 20;

struct RawShape {
  int64_t memory_bytes = kTensorsBytes;
  int pieces_for_one = 1;  // that goes back
};

void Answer(int fd, const RawShape& shape) {
  Pieces pieces(shape.memory_bytes);
  int got = 0;
  for (char* piece = pieces.Next(); ReadAll(fd, piece, kPieceBytes); piece = pieces.Next()) {
    if (++got % shape.pieces_for_one == 0 && !WriteAll(fd, piece, kPieceBytes)) break;
  }
  close(fd);
}

void ServeRaw(const std::string& port_file, const RawShape& shape) {
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0);
  CHECK(listen(listener, 64) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  WritePort(port_file, ntohs(address.sin_port));
  for (int fd; (fd = accept(listener, nullptr, nullptr)) >= 0;) {
    std::thread([fd, shape] { Answer(fd, shape); }).detach();
  }
}

int64_t CallRaw(const Load& load, int64_t memory_bytes) {
  Window window(load.seconds);
  std::atomic<int64_t> back{0};
  std::vector<std::thread> threads;
  for (int n = 0; n < load.connections; ++n) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(load.port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    threads.emplace_back([fd, &window, memory_bytes] {
      Pieces pieces(memory_bytes);
      while (!window.Over() && WriteAll(fd, pieces.Next(), kPieceBytes)) {
      }
      shutdown(fd, SHUT_WR);
    });
    threads.emplace_back([fd, &window, &back, memory_bytes] {
      Pieces pieces(memory_bytes);
      while (ReadAll(fd, pieces.Next(), kPieceBytes)) {
        if (window.Counts()) back += kPieceBytes;
      }
      close(fd);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return back;
}

double CpuSeconds() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

int Main(int argc, char** argv) {
  CHECK(argc >= 4) << "peer_echo stub|raw|tensors|forward serve PORT_FILE | call PORT MIB "
                      "CONNECTIONS DEPTH SECONDS";
  const std::string mode = argv[1];
  const bool stub = mode == "stub";
  const RawShape shape{.memory_bytes = mode == "raw" ? int64_t{kPieceBytes} : kTensorsBytes,
                       .pieces_for_one = mode == "forward" ? 3 : 1};
  if (std::string(argv[2]) == "serve") {
    stub ? ServeStub(argv[3]) : ServeRaw(argv[3], shape);
    return 0;
  }
  CHECK(argc == 8);
  Load load{.port = std::atoi(argv[3]),
            .bytes = int64_t{std::atoi(argv[4])} << 20,
            .connections = std::atoi(argv[5]),
            .depth = std::atoi(argv[6]),
            .seconds = std::atof(argv[7])};
  int64_t bytes = stub ? CallStub(load) : CallRaw(load, shape.memory_bytes);
  std::printf("%.6f %.6f\n", static_cast<double>(bytes) / load.seconds * 1e-9, CpuSeconds());
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) {
  attnd::TuneForTransport();
  return attnd::Main(argc, argv);
}
