// Who may call: TLS, client certificates, tokens. Certificates are made by openssl for each run.
#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "base/read_file.h"
#include "client/attention_client.h"
#include "client/cli/metrics_text.h"
#include "kernels/reference_backend.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/raw_http2.h"
#include "tests/fixtures/unique_name.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

// A folder with ca.pem, server.pem, client.pem, other_ca.pem, stranger.pem and their keys.
class Certificates {
 public:
  Certificates()
      : folder_(absl::StrCat(testing::TempDir(), "/certificates_", getpid(), "_", count_++)) {
    Run(absl::StrCat("mkdir -p ", folder_));
    Authority("ca");
    Authority("other_ca");
    Issue("server", "ca", "localhost");
    Issue("client", "ca", "trainer-7");
    Issue("stranger", "other_ca", "trainer-7");
  }
  std::string Path(const std::string& name) const {
    return absl::StrCat(folder_, "/", name, ".pem");
  }
  std::string KeyPath(const std::string& name) const {
    return absl::StrCat(folder_, "/", name, ".key");
  }
  void Issue(const std::string& name, const std::string& authority, const std::string& subject) {
    std::string request = absl::StrCat(folder_, "/", name, ".csr"), at = absl::StrCat(folder_, "/");
    Run(absl::StrCat("openssl req -newkey rsa:2048 -nodes -keyout ", at, name, ".key.new -out ",
                     request, " -subj /CN=", subject));
    Run(absl::StrCat("printf 'subjectAltName=DNS:", subject, "' > ", at, name, ".ext"));
    Run(absl::StrCat("openssl x509 -req -in ", request, " -CA ", Path(authority), " -CAkey ",
                     KeyPath(authority), " -CAcreateserial -days 2 -extfile ", at, name,
                     ".ext -out ", at, name, ".pem.new"));
    Run(absl::StrCat("mv ", at, name, ".key.new ", KeyPath(name)));
    Run(absl::StrCat("mv ", at, name, ".pem.new ", Path(name)));
  }

 private:
  void Authority(const std::string& name) {
    Run(absl::StrCat("openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout ", KeyPath(name),
                     " -out ", Path(name), " -subj /CN=", name));
  }
  static void Run(const std::string& command) {
    CHECK(std::system(absl::StrCat(command, " > /dev/null 2>&1").c_str()) == 0) << command;
  }
  static inline int count_ = 0;
  const std::string folder_;
};

const Certificates& Shared() {
  static const auto* certificates = new Certificates();
  return *certificates;
}

ServerOptions TlsServer(bool client_certificates) {
  ServerOptions options = TestOptions();
  options.tls.certificate = Shared().Path("server");
  options.tls.key = Shared().KeyPath("server");
  if (client_certificates) options.tls.client_ca = Shared().Path("ca");
  return options;
}

// A call over TLS; `client` names the certificate to show, "" for none.
grpc::Status CallOverTls(const Certificates& files, const std::string& address,
                         const std::string& authority, const std::string& client,
                         const std::string& token = "") {
  grpc::SslCredentialsOptions ssl;
  ssl.pem_root_certs = ReadFile(files.Path(authority));
  if (!client.empty()) {
    ssl.pem_cert_chain = ReadFile(files.Path(client));
    ssl.pem_private_key = ReadFile(files.KeyPath(client));
  }
  grpc::ChannelArguments arguments;
  arguments.SetSslTargetNameOverride("localhost");
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto stub = v1::Attention::NewStub(
      grpc::CreateCustomChannel(address, grpc::SslCredentials(ssl), arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  if (!token.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
  v1::ForwardResponse reply;
  return stub->Forward(&context, MakeForward(SmallProblem(), 1), &reply);
}

grpc::Status CallPlain(Daemon& daemon, const std::string& authorization) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  if (!authorization.empty()) context.AddMetadata("authorization", authorization);
  v1::ForwardResponse reply;
  return daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply);
}

TEST(DaemonTls, ServesCallersThatTrustItAndNobodyElse) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), TlsServer(false));
  grpc::Status status = CallOverTls(Shared(), daemon.address(), "ca", "");
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(CallOverTls(Shared(), daemon.address(), "other_ca", "").error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(CallPlain(daemon, "").error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST(DaemonTls, GivesTheEnginesBitsInMessagesAndInChunks) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), TlsServer(false));
  Problem p = SmallProblem(307, 3);
  p.batch = 2;
  p.qk_head_dim = 33;
  p.v_head_dim = 31;
  const ProblemInputs in = RandomInputs(p, 1);
  ReferenceBackend engine;
  const Outputs expected = RunWhole(engine, p, in);
  for (int64_t stream_above : {int64_t{0}, int64_t{1} << 30}) {
    SCOPED_TRACE(stream_above);
    auto client = AttentionClient::Connect(
        {.addresses = {daemon.address()},
         .tls = ClientTlsOptions{.ca_file = Shared().Path("ca"), .server_name = "localhost"},
         .shard_bytes = 50'000,
         .stream_above_bytes = stream_above});
    ASSERT_TRUE(client.ok()) << client.status();
    Outputs got(p);
    auto forward = (*client)->Forward(p, ForwardInputs(in), got.forward());
    ASSERT_TRUE(forward.ok()) << forward.status();
    EXPECT_GT(forward->shards, 1);
    auto backward = (*client)->Backward(p, BackwardInputs(in, expected), got.backward());
    ASSERT_TRUE(backward.ok()) << backward.status();
    EXPECT_TRUE(got.o == expected.o && got.lse == expected.lse);
    EXPECT_TRUE(got.d_q == expected.d_q && got.d_k == expected.d_k && got.d_v == expected.d_v);
  }
}

TEST(DaemonTls, DemandsACertificateOfItsAuthorityWhenAsked) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), TlsServer(true));
  grpc::Status status = CallOverTls(Shared(), daemon.address(), "ca", "client");
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(CallOverTls(Shared(), daemon.address(), "ca", "").error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(CallOverTls(Shared(), daemon.address(), "ca", "stranger").error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

TEST(DaemonTls, NamesTheCallerByItsCertificate) {
  ServerOptions options = TlsServer(true);
  options.admission.caller_max_calls = 0;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  grpc::Status status = CallOverTls(Shared(), daemon.address(), "ca", "client");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ((*ErrorInfoOf(status).mutable_metadata())["caller"], "trainer-7");
}

TEST(DaemonTls, LeavesUnixSocketsPlain) {
  ServerOptions options = TlsServer(true);
  options.listen = {UniqueName("unix:/tmp/attnd_security_"), "127.0.0.1:0"};
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  EXPECT_TRUE(CallPlain(daemon, "").ok());
  EXPECT_TRUE(CallOverTls(Shared(), daemon.server().addresses()[1], "ca", "client").ok());
}

TEST(DaemonTls, TakesANewCertificateWithoutARestart) {
  Certificates own;
  ServerOptions options = TestOptions();
  options.tls = {.certificate = own.Path("server"),
                 .key = own.KeyPath("server"),
                 .client_ca = "",
                 .refresh = absl::Seconds(1)};
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  EXPECT_TRUE(CallOverTls(own, daemon.address(), "ca", "").ok());
  own.Issue("server", "other_ca", "localhost");
  while (!CallOverTls(own, daemon.address(), "other_ca", "").ok()) std::this_thread::yield();
  EXPECT_FALSE(CallOverTls(own, daemon.address(), "ca", "").ok());
}

class TlsPeers {
 public:
  TlsPeers() : context_(SSL_CTX_new(TLS_client_method())) {
    std::signal(SIGPIPE, SIG_IGN);  // OpenSSL's writes to a connection that the daemon has ended
    const unsigned char http2[] = "\x02h2";
    CHECK(SSL_CTX_set_alpn_protos(context_, http2, 3) == 0);
  }
  ~TlsPeers() { SSL_CTX_free(context_); }
  std::unique_ptr<RawHttp2> New(Daemon& daemon) {
    return std::make_unique<RawHttp2>(daemon.address(), context_);
  }

 private:
  SSL_CTX* const context_;
};

TEST(DaemonTls, ClosesConnectionsWhoseHandshakeStopsHalfwayOrIsNone) {
  TlsPeers peers;
  ServerOptions options = TlsServer(false);
  options.transport.handshake_timeout = absl::Milliseconds(300);
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  const std::string beginning("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                              11);  // of a ClientHello
  const std::string in_plain_text = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  for (const std::string& sent :
       {std::string(), beginning, in_plain_text, std::string("\x16\x03\x01\xff\xff", 5),
        std::string(5000, '\xff')}) {
    RawHttp2 peer(daemon.address());
    if (!sent.empty()) peer.SendPlain(sent);
    while (!peer.ended()) peer.Read(100);
  }
  auto silent = peers.New(daemon);  // once TLS stands
  while (!silent->ended()) silent->Read(100);
  EXPECT_EQ(silent->answers(), 0);
  grpc::Status status = CallOverTls(Shared(), daemon.address(), "ca", "");
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(DaemonTls, RefusesFilesThatWouldServeNobody) {
  const std::string key = Shared().KeyPath("server"), other_key = Shared().KeyPath("client");
  const std::string certificate = Shared().Path("server");
  struct Case {
    TlsOptions tls;
    std::string message;
  };
  const Case cases[] = {
      {{.certificate = "/nonexistent.pem", .key = key, .client_ca = ""},
       "--tls_cert: expected a PEM file with a certificate, got /nonexistent.pem"},
      {{.certificate = certificate, .key = certificate, .client_ca = ""},
       absl::StrCat("--tls_key: expected a PEM file with an unencrypted key, got ", certificate)},
      {{.certificate = certificate, .key = other_key, .client_ca = ""},
       absl::StrCat("--tls_key: expected the key of --tls_cert, got another, ", other_key)},
      {{.certificate = certificate, .key = key, .client_ca = key},
       absl::StrCat("--tls_client_ca: expected a PEM file with a certificate, got ", key)},
  };
  RealClock clock;
  Logger log(stderr, LogFormat::kText, Severity::kError);
  for (const Case& one : cases) {
    ServerOptions options = TestOptions();
    options.tls = one.tls;
    auto server = AttndServer::Start(options, std::make_unique<ReferenceBackend>(), clock, log);
    ASSERT_FALSE(server.ok());
    EXPECT_EQ(server.status().message(), one.message);
  }
}

TEST(DaemonTls, TellsMetricsWhenItsCertificatesEnd) {
  ServerOptions options = TlsServer(true);
  options.metrics_listen = "127.0.0.1:0";
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  auto text =
      FetchMetrics(absl::StrCat("http://127.0.0.1:", daemon.server().metrics_port(), "/metrics"),
                   absl::Seconds(10));
  ASSERT_TRUE(text.ok()) << text.status();
  auto metrics = MetricsText::Parse(*text);
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  const double now = static_cast<double>(absl::ToUnixSeconds(absl::Now()));
  for (const char* role : {"server", "client_ca"}) {  // made for two days
    double end = metrics->Sum("attnd_tls_certificate_expiry_timestamp_seconds", {{"role", role}});
    EXPECT_GT(end, now + 86400) << role;
    EXPECT_LE(end, now + 2 * 86400) << role;
  }
}

class DaemonToken : public testing::Test {
 protected:
  DaemonToken() {
    options_.token_file = absl::StrCat(testing::TempDir(), "/tokens_", getpid());
    std::ofstream(options_.token_file)
        << "# callers\nalice 0123456789abcdef\nbob fedcba9876543210\n";
  }
  ServerOptions options_ = TestOptions();
};

TEST_F(DaemonToken, AcceptsKnownTokensAndRefusesTheRest) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), options_);
  EXPECT_TRUE(CallPlain(daemon, "Bearer 0123456789abcdef").ok());
  EXPECT_TRUE(CallPlain(daemon, "bearer fedcba9876543210").ok());
  struct Refused {
    const char* header;
    const char* reason;
  };
  for (const Refused& refused :
       {Refused{"", "TOKEN_MISSING"}, Refused{"Basic YTpi", "TOKEN_MISSING"},
        Refused{"Bearer ", "TOKEN_INVALID"}, Refused{"Bearer 0123456789abcdeF", "TOKEN_INVALID"},
        Refused{"Bearer 0123456789abcde", "TOKEN_INVALID"},
        Refused{"Bearer 0123456789abcdef0", "TOKEN_INVALID"}}) {
    grpc::Status status = CallPlain(daemon, refused.header);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << refused.header;
    EXPECT_EQ(ErrorInfoOf(status).reason(), refused.reason) << refused.header;
  }
}

TEST_F(DaemonToken, ComesAndGoesWithoutARestart) {
  options_.tls.refresh = absl::Seconds(1);
  Daemon daemon(std::make_unique<ReferenceBackend>(), options_);
  EXPECT_TRUE(CallPlain(daemon, "Bearer 0123456789abcdef").ok());
  std::ofstream(options_.token_file) << "alice 1111222233334444\n";
  while (!CallPlain(daemon, "Bearer 1111222233334444").ok()) std::this_thread::yield();
  EXPECT_EQ(ErrorInfoOf(CallPlain(daemon, "Bearer 0123456789abcdef")).reason(), "TOKEN_INVALID");
}

TEST_F(DaemonToken, IsNeededForServerInfoToo) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), options_);
  v1::GetServerInfoResponse reply;
  grpc::ClientContext without, with;
  EXPECT_EQ(daemon.stub().GetServerInfo(&without, {}, &reply).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(reply.device_size(), 0);
  with.AddMetadata("authorization", "Bearer 0123456789abcdef");
  EXPECT_TRUE(daemon.stub().GetServerInfo(&with, {}, &reply).ok());
}

TEST_F(DaemonToken, NamesTheCallerAndKeepsQuotasApart) {
  options_.admission.caller_max_calls = 0;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options_);
  grpc::Status status = CallPlain(daemon, "Bearer fedcba9876543210");
  EXPECT_EQ((*ErrorInfoOf(status).mutable_metadata())["caller"], "bob");
}

}  // namespace
}  // namespace attnd
