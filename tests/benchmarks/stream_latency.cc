// How long one ForwardStream takes, sent as any client may: the whole call as one stream in chunks
// of 1 MiB, as fast as the connection takes them or at the rate of a link. Daemons are called in
// turns, so that two builds can be compared; ms, medians.
//
//     bazel build //server:attnd //tests/benchmarks:stream_latency
//     stream_latency HEADS LENGTH HEAD_DIM float16|float32 GBIT ROUNDS ADDRESS...    # GBIT 0: any
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "base/transport_tuning.h"
#include "client/call/problem_to_proto.h"
#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/chunk_framing.h"

namespace attnd {
namespace {

// A request's messages, over the tensors' own memory.
std::vector<grpc::ByteBuffer> MessagesOf(const Problem& problem, const ProblemInputs& inputs) {
  v1::ForwardRequest request;
  *request.mutable_problem() = ToProto(problem);
  grpc::Slice header(FrameHeader(request.SerializeAsString()));
  std::vector<grpc::ByteBuffer> messages = {grpc::ByteBuffer(&header, 1)};
  auto add = [&](int field, const AlignedBytes& tensor) {
    for (int64_t at = 0; at < tensor.size(); at += kChunkBytes) {
      const int64_t bytes = std::min(kChunkBytes, tensor.size() - at);
      grpc::Slice slices[] = {
          grpc::Slice(ChunkPrefix(field, at, bytes)),
          grpc::Slice(tensor.data() + at, static_cast<size_t>(bytes), grpc::Slice::STATIC_SLICE)};
      messages.emplace_back(slices, 2);
    }
  };
  add(v1::ForwardRequest::kKFieldNumber, inputs.k);
  add(v1::ForwardRequest::kVFieldNumber, inputs.v);
  add(v1::ForwardRequest::kQFieldNumber, inputs.q);
  return messages;
}

class Caller {
 public:
  explicit Caller(const std::string& address) : stub_(ChannelTo(address)) {}

  // `seconds_per_byte`: of the link.
  double Milliseconds(const std::vector<grpc::ByteBuffer>& messages, double seconds_per_byte) {
    const absl::Time start = absl::Now();
    absl::Time due = start;
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    auto stream = stub_.PrepareCall(&context, "/attnd.v1.Attention/ForwardStream", &queue);
    auto done = [&] {
      void* tag;
      bool ok = false;
      CHECK(queue.Next(&tag, &ok));
      return ok;
    };
    stream->StartCall(nullptr);
    CHECK(done());
    for (const grpc::ByteBuffer& message : messages) {
      due += absl::Seconds(seconds_per_byte * static_cast<double>(message.Length()));
      absl::SleepFor(due - absl::Now());
      stream->Write(message, nullptr);
      CHECK(done());
    }
    stream->WritesDone(nullptr);
    CHECK(done());
    for (bool more = true; more;) {
      grpc::ByteBuffer reply;
      stream->Read(&reply, nullptr);
      more = done();
    }
    grpc::Status status;
    stream->Finish(&status, nullptr);
    CHECK(done() && status.ok()) << status.error_message();
    return absl::ToDoubleMilliseconds(absl::Now() - start);
  }

 private:
  static std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }

  grpc::GenericStub stub_;
};

int Main(int argc, char** argv) {
  if (argc < 8) {
    std::fputs("stream_latency HEADS LENGTH HEAD_DIM float16|float32 GBIT ROUNDS ADDRESS...\n",
               stderr);
    return 2;
  }
  TuneForTransport();
  Problem problem;
  problem.batch = 1;
  problem.q_heads = problem.kv_heads = std::atoi(argv[1]);
  problem.q_len = problem.kv_len = std::atoi(argv[2]);
  problem.qk_head_dim = problem.v_head_dim = std::atoi(argv[3]);
  problem.element =
      argv[4] == std::string("float16") ? ElementType::kFloat16 : ElementType::kFloat32;
  const double gbit = std::atof(argv[5]);
  const int rounds = std::atoi(argv[6]);
  const ProblemInputs inputs = RandomInputs(problem, 1);
  const std::vector<grpc::ByteBuffer> messages = MessagesOf(problem, inputs);
  std::vector<std::unique_ptr<Caller>> callers;
  std::vector<std::vector<double>> times(static_cast<size_t>(argc - 7));
  for (int n = 7; n < argc; ++n) callers.push_back(std::make_unique<Caller>(argv[n]));
  for (int round = -2; round < rounds; ++round) {  // two to warm up
    for (size_t n = 0; n < callers.size(); ++n) {
      const double took = callers[n]->Milliseconds(messages, gbit > 0 ? 8e-9 / gbit : 0);
      if (round >= 0) times[n].push_back(took);
    }
  }
  std::printf("heads %s length %s head_dim %s %s, %s Gbit/s:", argv[1], argv[2], argv[3], argv[4],
              argv[5]);
  for (std::vector<double>& of : times) {
    std::sort(of.begin(), of.end());
    std::printf(" %8.2f", of[of.size() / 2]);
  }
  std::printf(" ms\n");
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
