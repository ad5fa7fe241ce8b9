#include "base/service_notify.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

// Stands for systemd: a datagram socket that takes states.
class Listener {
 public:
  explicit Listener(const std::string& name) {
    sockaddr_un at = {};
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path, name.data(), name.size());
    if (name[0] == '@') at.sun_path[0] = 0;
    socklen_t length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
    EXPECT_EQ(bind(descriptor_, reinterpret_cast<sockaddr*>(&at), length), 0);
  }
  ~Listener() { close(descriptor_); }
  std::string Receive() {
    char text[256];
    ssize_t size = recv(descriptor_, text, sizeof(text), MSG_DONTWAIT);
    return size < 0 ? "nothing" : std::string(text, static_cast<size_t>(size));
  }

 private:
  int descriptor_ = socket(AF_UNIX, SOCK_DGRAM, 0);
};

std::string UniqueName() { return absl::StrCat("attnd_notify_", getpid()); }

TEST(ServiceNotify, SendsToAnAbstractSocket) {
  std::string name = absl::StrCat("@", UniqueName());
  Listener listener(name);
  ASSERT_TRUE(NotifyServiceManagerAt(name, "READY=1").ok());
  EXPECT_EQ(listener.Receive(), "READY=1");
}

TEST(ServiceNotify, SendsToTheSocketOfTheEnvironment) {
  std::string path = absl::StrCat("/tmp/", UniqueName());
  Listener listener(path);
  setenv("NOTIFY_SOCKET", path.c_str(), 1);
  EXPECT_TRUE(NotifyServiceManager("STOPPING=1").ok());
  unsetenv("NOTIFY_SOCKET");
  EXPECT_EQ(listener.Receive(), "STOPPING=1");
  EXPECT_TRUE(NotifyServiceManager("READY=1").ok());
  EXPECT_EQ(listener.Receive(), "nothing");
  unlink(path.c_str());
}

TEST(ServiceNotify, KnowsWhetherAWatchdogWaits) {
  EXPECT_EQ(WatchdogPeriod(), absl::InfiniteDuration());
  setenv("WATCHDOG_USEC", "30000000", 1);
  EXPECT_EQ(WatchdogPeriod(), absl::Seconds(30));
  setenv("WATCHDOG_PID", absl::StrCat(getpid()).c_str(), 1);
  EXPECT_EQ(WatchdogPeriod(), absl::Seconds(30));
  setenv("WATCHDOG_PID", "1", 1);
  EXPECT_EQ(WatchdogPeriod(), absl::InfiniteDuration());
  unsetenv("WATCHDOG_PID");
  for (const char* wrong : {"", "0", "-5", "soon"}) {
    setenv("WATCHDOG_USEC", wrong, 1);
    EXPECT_EQ(WatchdogPeriod(), absl::InfiniteDuration()) << wrong;
  }
  unsetenv("WATCHDOG_USEC");
}

TEST(ServiceNotify, RefusesWhatIsNoSocket) {
  for (const std::string& address :
       {std::string("relative"), std::string("/"), std::string(200, '/')}) {
    EXPECT_EQ(NotifyServiceManagerAt(address, "READY=1").code(), absl::StatusCode::kInvalidArgument)
        << address;
  }
  EXPECT_EQ(NotifyServiceManagerAt("/no/such/socket", "READY=1").code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace attnd
