#include "server/app/flags.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "net/listen_address.h"

namespace attnd {
namespace {

absl::StatusOr<Flags> Parse(std::vector<const char*> words, std::ostream* out = nullptr) {
  std::ostringstream unused;
  words.insert(words.begin(), "attnd");
  return ParseFlags(static_cast<int>(words.size()), words.data(), "1.2.3 (abc)",
                    out != nullptr ? *out : unused);
}

TEST(Flags, HaveSafeDefaults) {
  auto flags = Parse({});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->action, FlagAction::kServe);
  EXPECT_EQ(flags->options.listen, (std::vector<std::string>{"127.0.0.1:7070"}));
  EXPECT_EQ(flags->options.metrics_listen, "127.0.0.1:9464");
  EXPECT_FALSE(flags->options.insecure);
  EXPECT_EQ(flags->options.nccl_library, "");
  EXPECT_EQ(flags->options.admission.caller_max_bytes, flags->options.admission.memory_bytes);
}

TEST(Flags, ReachTheOptions) {
  auto flags = Parse({"--listen",
                      "127.0.0.1:1,unix:/tmp/a",
                      "--listen",
                      "[::1]:2",
                      "--memory_limit_mib",
                      "32",
                      "--caller_memory_mib",
                      "8",
                      "--max_deadline_seconds",
                      "1.5",
                      "--drain_delay",
                      "2",
                      "--log_format",
                      "json",
                      "--log_level",
                      "debug",
                      "--backend",
                      "cpu",
                      "--cpu_threads",
                      "3",
                      "--shared_memory_limit_mib",
                      "16",
                      "--max_message_mib",
                      "4",
                      "--max_modules",
                      "5",
                      "--module_hbm_fraction",
                      "0.25",
                      "--module_shadow_every",
                      "6",
                      "--module_save_seconds",
                      "2.5",
                      "--nccl_library",
                      "libnccl.so.2",
                      "--max_queue_seconds",
                      "7",
                      "--port_file",
                      "/tmp/p"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  const ServerOptions& o = flags->options;
  EXPECT_EQ(o.listen, (std::vector<std::string>{"127.0.0.1:1", "unix:/tmp/a", "[::1]:2"}));
  EXPECT_EQ(o.admission.memory_bytes, 32 << 20);
  EXPECT_EQ(o.admission.caller_max_bytes, 8 << 20);
  EXPECT_EQ(o.admission.max_deadline, absl::Milliseconds(1500));
  EXPECT_EQ(o.drain_delay, absl::Seconds(2));
  EXPECT_EQ(o.log_format, LogFormat::kJson);
  EXPECT_EQ(o.log_level, Severity::kDebug);
  EXPECT_EQ(o.backend, "cpu");
  EXPECT_EQ(o.cpu_threads, 3);
  EXPECT_EQ(o.shared_memory.max_bytes, 16 << 20);
  EXPECT_EQ(o.shared_memory.user_max_bytes, 16 << 20);
  EXPECT_EQ(o.transport.max_message_bytes, 4 << 20);
  EXPECT_EQ(o.admission.max_queue_seconds, 7);
  EXPECT_EQ(o.modules.max_modules, 5);
  EXPECT_EQ(o.modules.hbm_fraction, 0.25);
  EXPECT_EQ(o.modules.shadow_every, 6);
  EXPECT_EQ(o.modules.save_every, absl::Milliseconds(2500));
  EXPECT_EQ(o.nccl_library, "libnccl.so.2");
  EXPECT_EQ(o.port_file, "/tmp/p");
}

TEST(Flags, ReachTheTransport) {
  auto flags =
      Parse({"--max_concurrent_streams", "3", "--receive_memory_mib", "64", "--max_connections",
             "7", "--max_connection_age_seconds", "60", "--max_connection_idle_seconds", "61",
             "--keepalive_seconds", "30", "--stream_idle_seconds", "1.5", "--bdp_probe", "on"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  const TransportOptions& t = flags->options.transport;
  EXPECT_EQ(t.max_concurrent_streams, 3);
  EXPECT_EQ(t.receive_memory_bytes, 64 << 20);
  EXPECT_EQ(t.max_connections, 7);
  EXPECT_EQ(t.max_connection_age, absl::Seconds(60));
  EXPECT_EQ(t.max_connection_idle, absl::Seconds(61));
  EXPECT_EQ(t.keepalive_time, absl::Seconds(30));
  EXPECT_EQ(t.transfers.idle, absl::Milliseconds(1500));
  EXPECT_EQ(t.bdp_probe, "on");
}

TEST(Flags, DefaultToTheOptionsOwnValues) {
  auto flags = Parse({});
  ASSERT_TRUE(flags.ok()) << flags.status();
  const TransportOptions &t = flags->options.transport, expected;
  EXPECT_EQ(flags->options.leases.ttl, ServerOptions().leases.ttl);
  EXPECT_EQ(flags->options.drain_delay, ServerOptions().drain_delay);
  EXPECT_EQ(t.max_message_bytes, expected.max_message_bytes);
  EXPECT_EQ(t.receive_memory_bytes, expected.receive_memory_bytes);
  EXPECT_EQ(t.max_connection_age, expected.max_connection_age);
  EXPECT_EQ(t.max_connection_idle, expected.max_connection_idle);
  EXPECT_EQ(t.keepalive_time, expected.keepalive_time);
  EXPECT_EQ(t.transfers.idle, expected.transfers.idle);
  EXPECT_EQ(t.bdp_probe, expected.bdp_probe);
}

TEST(Flags, MayStandInAFileWhichTheCommandLineOverrides) {
  std::string path = absl::StrCat(testing::TempDir(), "/attnd.ini");
  std::ofstream(path) << "cpu_threads = 3\nlog_level = warning\n";
  auto flags = Parse({"--config", path.c_str(), "--cpu_threads", "4"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->options.cpu_threads, 4);
  EXPECT_EQ(flags->options.log_level, Severity::kWarning);
  std::ofstream(path) << "cpu_thread = 3\n";
  EXPECT_FALSE(Parse({"--config", path.c_str()}).ok());
}

TEST(Flags, TakeNoValueFromTheNextWord) {
  auto flags = Parse({"--metrics_listen=", "--cpu_threads", "3", "--kernel_cache="});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->options.metrics_listen, "");
  EXPECT_EQ(flags->options.cpu_threads, 3);
  EXPECT_EQ(flags->options.kernel_cache, "");
  flags = Parse({"--token_file=", "--listen=127.0.0.1:5"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->options.token_file, "");
  EXPECT_EQ(flags->options.listen, (std::vector<std::string>{"127.0.0.1:5"}));
}

TEST(Flags, SayWhetherLayersAreFused) {
  EXPECT_EQ(Parse({})->options.fusion, Fusion::kBound);
  EXPECT_EQ(Parse({"--fusion", "off"})->options.fusion, Fusion::kOff);
  EXPECT_EQ(Parse({"--fusion", "measured"})->options.fusion, Fusion::kMeasured);
  EXPECT_FALSE(Parse({"--fusion", "on"}).ok());
}

TEST(Flags, NameTheFlagThatIsWrong) {
  struct Case {
    std::vector<const char*> words;
    const char* message;
  };
  const Case cases[] = {
      {{"--nonsense"}, "nonsense"},
      {{"stray"}, "stray"},
      {{"--cpu_threads", "x"}, "--cpu_threads: expected a number, got \"x\""},
      {{"--cpu_threads", "1.5"}, "--cpu_threads"},
      {{"--cpu_threads", "4097"}, "--cpu_threads: expected 0..4096, got 4097"},
      {{"--max_launch_ms", "inf"}, "--max_launch_ms: expected 1..10000, got inf"},
      {{"--listen", "nowhere"}, "--listen: expected host:port"},
      {{"--listen", "127.0.0.1:65536"}, "--listen: expected host:port"},
      {{"--listen", "unix:"}, "--listen: expected unix:PATH"},
      {{"--listen", "127.0.0.1:1,127.0.0.1:1"}, "--listen: expected different addresses"},
      {{"--listen", "unix:/a", "--listen", "unix:/a"}, "--listen: expected different addresses"},
      {{"--listen", "127.example.org:1"}, "--listen: expected TLS"},
      {{"--metrics_listen", "9464"}, "--metrics_listen: expected host:port"},
      {{"--listen", "127.0.0.1:1", "--metrics_listen", "127.0.0.1:1"},
       "--metrics_listen: expected another address than --listen's, got \"127.0.0.1:1\""},
      {{"--backend", "gpu"}, "--backend: expected auto, cpu, cuda or reference, got gpu"},
      {{"--log_format", "xml"}, "log_format"},
      {{"--memory_limit_mib", "0"}, "--memory_limit_mib: expected"},
      {{"--memory_limit_mib", "-1"}, "--memory_limit_mib: expected 1..1048576, got -1"},
      {{"--max_calls", "0"}, "--max_calls: expected 1..1048576, got 0"},
      {{"--max_deadline_seconds", "0"}, "--max_deadline_seconds: expected"},
      {{"--max_message_mib", "2048"}, "--max_message_mib: expected 1..1024, got 2048"},
      {{"--max_message_mib", "1e300"}, "--max_message_mib: expected 1..1024, got"},
      {{"--max_message_mib", "nan"}, "--max_message_mib: expected a number, got \"nan\""},
      {{"--drain_delay", ""}, "--drain_delay: expected a number, got \"\""},
      {{"--max_calls", ""}, "--max_calls: expected a number, got \"\""},
      {{"--max_calls=", "--backend", "cpu"}, "--max_calls: expected a number, got \"\""},
      {{"--insecure="}, "not expected"},
      {{"--insecure=maybe"}, "--insecure"},
      {{"--max_connections", "0"}, "--max_connections: expected 1..1048576, got 0"},
      {{"--max_connection_age_seconds", "0"}, "--max_connection_age_seconds: expected 1.."},
      {{"--max_connection_idle_seconds", "0"}, "--max_connection_idle_seconds: expected 1.."},
      {{"--keepalive_seconds", "0"}, "--keepalive_seconds: expected 1.."},
      {{"--max_modules", "0"}, "--max_modules: expected 1..65536, got 0"},
      {{"--module_hbm_fraction", "1"}, "--module_hbm_fraction: expected 0..0.95, got 1"},
      {{"--module_shadow_every", "-1"}, "--module_shadow_every: expected 0.."},
      {{"--module_save_seconds", "0"}, "--module_save_seconds: expected 0.001.."},
      {{"--bdp_probe", "maybe"}, "--bdp_probe: expected auto, on or off, got maybe"},
      {{"--receive_memory_mib", "1"}, "--receive_memory_mib: expected"},
      {{"--max_concurrent_streams", "0"}, "--max_concurrent_streams: expected 1..65536, got 0"},
      {{"--tls_cert", "a"}, "--tls_key: expected both"},
      {{"--tls_key", "a"}, "--tls_cert: expected both"},
      {{"--tls_client_ca", "a"}, "--tls_client_ca: expected"},
      {{"--listen", "0.0.0.0:1"}, "--listen: expected TLS"},
      {{"--listen", "[::]:1"}, "--listen: expected TLS"},
      {{"--listen", "127.0.0.1:1", "--listen", "example.org:1"}, "--listen: expected TLS"},
      {{"--listen", "0.0.0.0:1", "--tls_cert", "a", "--tls_key", "b"},
       "--listen: expected --tls_client_ca, --token_file or --insecure"},
  };
  for (const Case& one : cases) {
    auto flags = Parse(one.words);
    EXPECT_FALSE(flags.ok()) << one.message;
    EXPECT_TRUE(absl::StrContains(flags.status().message(), one.message)) << flags.status();
  }
}

TEST(Flags, AllowOtherAddressesWhenTheyAreProtectedOrItIsSaid) {
  EXPECT_TRUE(Parse({"--listen", "0.0.0.0:1", "--insecure"}).ok());
  EXPECT_TRUE(
      Parse({"--listen", "0.0.0.0:1", "--tls_cert", "a", "--tls_key", "b", "--token_file", "c"})
          .ok());
  EXPECT_TRUE(
      Parse({"--listen", "0.0.0.0:1", "--tls_cert", "a", "--tls_key", "b", "--tls_client_ca", "c"})
          .ok());
}

TEST(Flags, PrintHelpAndVersion) {
  std::ostringstream help, version;
  EXPECT_EQ(Parse({"--help"}, &help)->action, FlagAction::kPrinted);
  for (const char* part :
       {"Addresses", "Security", "Limits", "--max_queue_seconds", "Exit codes"}) {
    EXPECT_TRUE(absl::StrContains(help.str(), part)) << help.str();
  }
  EXPECT_EQ(Parse({"--version"}, &version)->action, FlagAction::kPrinted);
  EXPECT_EQ(version.str(), "attnd 1.2.3 (abc)\n");
  EXPECT_EQ(Parse({"--check_config"})->action, FlagAction::kCheckConfig);
}

TEST(Addresses, AreLoopbackOrNot) {
  for (const char* address :
       {"127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/a", "unix-abstract:a"}) {
    EXPECT_TRUE(IsLoopbackAddress(address)) << address;
  }
  for (const char* address : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "*:1",
                              "127.example.org:1", "127.1.example:1"}) {
    EXPECT_FALSE(IsLoopbackAddress(address)) << address;
  }
}

TEST(Addresses, AreProbedForBandwidthWhereOtherHostsMayConnect) {
  ServerOptions options;
  options.listen = {"127.0.0.1:1", "unix:/a"};
  EXPECT_FALSE(ProbesBandwidth(options.transport, options.listen));
  options.transport.bdp_probe = "on";
  EXPECT_TRUE(ProbesBandwidth(options.transport, options.listen));
  options.transport.bdp_probe = "auto";
  options.listen.push_back("10.0.0.1:1");
  EXPECT_TRUE(ProbesBandwidth(options.transport, options.listen));
  options.transport.bdp_probe = "off";
  EXPECT_FALSE(ProbesBandwidth(options.transport, options.listen));
}

}  // namespace
}  // namespace attnd
