#include "tests/emulated_link.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"

namespace attnd {
namespace {

// virtio 1.2, section 5.1.6 (linux/virtio_net.h is not C++).
struct VirtioHeader {
  uint8_t flags = 0, segmentation = 0;
  uint16_t header_bytes = 0, packet_bytes = 0, checksum_from = 0, checksum_at = 0;
};
constexpr uint8_t kOnePacket = 0;  // VIRTIO_NET_HDR_GSO_NONE
constexpr size_t kVirtioBytes = sizeof(VirtioHeader);
static_assert(kVirtioBytes == 10);
constexpr size_t kMostSegment = kVirtioBytes + 65536;

int OpenTun(const char* name, int flags) {
  int tun = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (tun < 0) return -1;
  ifreq request{};
  request.ifr_flags = static_cast<int16_t>(IFF_TUN | IFF_NO_PI | flags);
  std::strcpy(request.ifr_name, name);
  if (ioctl(tun, TUNSETIFF, &request) == 0) return tun;
  close(tun);
  return -1;
}

void SetAddress(int control, unsigned long what, const char* text) {
  ifreq request{};
  std::strcpy(request.ifr_name, "link0");
  auto& address = reinterpret_cast<sockaddr_in&>(request.ifr_addr);
  address.sin_family = AF_INET;
  CHECK(inet_pton(AF_INET, text, &address.sin_addr) == 1) << text;
  CHECK(ioctl(control, what, &request) == 0) << text;
}

// A TUN device with this address, up, in the namespace of the calling thread; lo too.
int MakeEnd(const char* address) {
  int tun = OpenTun("link0", IFF_VNET_HDR);
  CHECK(tun >= 0) << "/dev/net/tun";
  CHECK(ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) == 0) << "TUNSETOFFLOAD";
  int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  SetAddress(control, SIOCSIFADDR, address);
  SetAddress(control, SIOCSIFNETMASK, "255.255.255.0");
  ifreq request{};
  std::strcpy(request.ifr_name, "link0");
  request.ifr_mtu = EmulatedLink::kMtu;
  CHECK(ioctl(control, SIOCSIFMTU, &request) == 0) << "SIOCSIFMTU";
  request.ifr_qlen = 2000;
  (void)ioctl(control, SIOCSIFTXQLEN, &request);  // not every sandbox allows it; 500 then
  for (const char* name : {"link0", "lo"}) {
    ifreq up{};
    std::strcpy(up.ifr_name, name);
    up.ifr_flags = IFF_UP | IFF_RUNNING;
    CHECK(ioctl(control, SIOCSIFFLAGS, &up) == 0) << "SIOCSIFFLAGS " << name;
  }
  close(control);
  return tun;
}

void OnNewHost(int& host, const std::function<void()>& work) {
  std::thread([&] {
    CHECK(unshare(CLONE_NEWNET) == 0) << "unshare";
    host = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    CHECK(host >= 0) << "/proc/thread-self/ns/net";
    work();
  }).join();
}

// Of a segment that is to be cut into packets.
struct Headers {
  VirtioHeader virtio;
  iphdr ip;
  tcphdr tcp;
  size_t payload_at = 0;
};
// False: one packet, whatever it is.
bool ReadHeaders(const LinkSegment& segment, Headers& headers) {
  std::memcpy(&headers.virtio, segment.data(), kVirtioBytes);
  if (headers.virtio.segmentation == kOnePacket) return false;
  std::memcpy(&headers.ip, segment.data() + kVirtioBytes, sizeof(iphdr));
  const size_t tcp_at = kVirtioBytes + headers.ip.ihl * 4;
  std::memcpy(&headers.tcp, segment.data() + tcp_at, sizeof(tcphdr));
  headers.payload_at = tcp_at + headers.tcp.doff * 4;
  return segment.size() > headers.payload_at && headers.virtio.packet_bytes > 0;
}

uint16_t IpChecksum(const char* header, size_t bytes) {
  uint32_t sum = 0;
  for (size_t n = 0; n < bytes; n += 2) {
    uint16_t word;
    std::memcpy(&word, header + n, 2);
    sum += word;
  }
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<uint16_t>(~sum);
}

// Packets [first, last) of a segment. The TCP checksum is left to the receiving host's card, which
// takes it as right.
LinkSegment Packets(const LinkSegment& segment, const Headers& headers, int64_t first,
                    int64_t last) {
  const int64_t each = headers.virtio.packet_bytes;
  const auto payload = static_cast<int64_t>(segment.size() - headers.payload_at);
  const int64_t begin = first * each, end = std::min(last * each, payload);
  LinkSegment part(segment.begin(), segment.begin() + static_cast<int64_t>(headers.payload_at));
  const auto from = segment.begin() + static_cast<int64_t>(headers.payload_at);
  part.insert(part.end(), from + begin, from + end);
  Headers own = headers;
  if (last - first == 1) {
    own.virtio.segmentation = kOnePacket;
    own.virtio.packet_bytes = 0;
  }
  own.ip.tot_len = htons(static_cast<uint16_t>(part.size() - kVirtioBytes));
  own.ip.check = 0;
  own.tcp.seq = htonl(ntohl(headers.tcp.seq) + static_cast<uint32_t>(begin));
  std::memcpy(part.data(), &own.virtio, kVirtioBytes);
  char* const ip_at = part.data() + kVirtioBytes;
  const size_t ip_bytes = headers.ip.ihl * size_t{4};
  std::memcpy(ip_at, &own.ip, sizeof(iphdr));
  own.ip.check = IpChecksum(ip_at, ip_bytes);
  std::memcpy(ip_at, &own.ip, sizeof(iphdr));
  std::memcpy(ip_at + ip_bytes, &own.tcp, sizeof(tcphdr));
  return part;
}

}  // namespace

int64_t PacketsOf(const LinkSegment& segment) {
  Headers headers;
  if (!ReadHeaders(segment, headers)) return 1;
  const auto payload = static_cast<int64_t>(segment.size() - headers.payload_at);
  return (payload + headers.virtio.packet_bytes - 1) / headers.virtio.packet_bytes;
}

std::vector<LinkSegment> WithoutPackets(const LinkSegment& segment,
                                        const std::vector<int64_t>& lost) {
  std::vector<LinkSegment> parts;
  Headers headers;
  if (lost.empty()) return {segment};
  if (!ReadHeaders(segment, headers)) return {};
  int64_t begin = 0;
  auto keep_until = [&](int64_t end) {
    if (end > begin) parts.push_back(Packets(segment, headers, begin, end));
  };
  for (int64_t packet : lost) {
    keep_until(packet);
    begin = packet + 1;
  }
  keep_until(PacketsOf(segment));
  return parts;
}

// One thread takes what a host sends, another gives it to the other host when it is due.
class EmulatedLink::Direction {
 public:
  Direction(int from, int to, uint64_t number)
      : from_(from), to_(to), number_(number), taker_([this] { TakeAll(); }), giver_([this] {
          GiveAll();
        }) {}
  ~Direction() {
    {
      absl::MutexLock lock(&mutex_);
      stop_ = true;
      came_.Signal();
    }
    taker_.join();
    giver_.join();
  }

  void Use(const Options& options) {
    absl::MutexLock lock(&mutex_);
    options_ = options;
    random_ = Random(options.seed * 2 + number_);
  }
  int64_t dropped() const { return dropped_; }
  int64_t overtook() const { return overtook_; }

 private:
  bool Stopping() {
    absl::MutexLock lock(&mutex_);
    return stop_;
  }

  void TakeAll() {
    constexpr int kLookMs = 20;
    std::vector<char> buffer(kMostSegment);
    while (!Stopping()) {
      pollfd event{from_, POLLIN, 0};
      poll(&event, 1, kLookMs);
      for (ssize_t size; (size = read(from_, buffer.data(), buffer.size())) > 0;) {
        Take(LinkSegment(buffer.begin(), buffer.begin() + size));
      }
    }
  }

  void Take(LinkSegment segment) {
    absl::MutexLock lock(&mutex_);
    const int64_t now = absl::GetCurrentTimeNanos();
    line_free_ = std::max(line_free_, now);
    const double per_byte = options_.bits_per_second > 0 ? 8e9 / options_.bits_per_second : 0;
    const int64_t packets = PacketsOf(segment);
    if (double(line_free_ - now) > per_byte * double(options_.queue_bytes)) {
      dropped_ += packets;
      return;
    }
    constexpr int64_t kHeaderBytes = 52;  // of each packet but the first, which has it
    const int64_t on_line =
        static_cast<int64_t>(segment.size() - kVirtioBytes) + (packets - 1) * kHeaderBytes;
    line_free_ += static_cast<int64_t>(double(on_line) * per_byte);
    const bool overtakes = random_.Chance(options_.reorder);
    overtook_ += overtakes;
    const int64_t due = overtakes ? now : line_free_ + absl::ToInt64Nanoseconds(options_.delay);
    const std::vector<int64_t> lost = Lost(packets);
    if (lost.empty()) {
      Put(due, std::move(segment));
    } else {
      for (LinkSegment& part : WithoutPackets(segment, lost)) Put(due, std::move(part));
    }
  }

  std::vector<int64_t> Lost(int64_t packets) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<int64_t> lost;
    for (int64_t n = 0; n < packets && options_.loss > 0; ++n) {
      if (random_.Chance(options_.loss)) lost.push_back(n);
    }
    dropped_ += static_cast<int64_t>(lost.size());
    return lost;
  }

  void Put(int64_t due, LinkSegment segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool is_first = waiting_.empty() || due < waiting_.begin()->first;
    waiting_.emplace(due, std::move(segment));
    if (is_first) came_.Signal();
  }

  void GiveAll() {
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // nanoseconds; 50 µs otherwise
    absl::MutexLock lock(&mutex_);
    while (!stop_) {
      const int64_t due = waiting_.empty() ? INT64_MAX : waiting_.begin()->first;
      if (due > absl::GetCurrentTimeNanos()) {
        came_.WaitWithDeadline(
            &mutex_, due == INT64_MAX ? absl::InfiniteFuture() : absl::FromUnixNanos(due));
        continue;
      }
      const LinkSegment segment = std::move(waiting_.begin()->second);
      waiting_.erase(waiting_.begin());
      mutex_.Unlock();
      if (write(to_, segment.data(), segment.size()) < 0) dropped_ += PacketsOf(segment);
      mutex_.Lock();
    }
  }

  const int from_, to_;
  const uint64_t number_;
  absl::Mutex mutex_;
  absl::CondVar came_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  Options options_ ABSL_GUARDED_BY(mutex_);
  Random random_ ABSL_GUARDED_BY(mutex_){0};
  std::multimap<int64_t, LinkSegment> waiting_ ABSL_GUARDED_BY(mutex_);  // by when it is due, in ns
  int64_t line_free_ ABSL_GUARDED_BY(mutex_) = 0;  // when the last packet has left
  std::atomic<int64_t> dropped_{0}, overtook_{0};
  std::thread taker_, giver_;
};

bool EmulatedLink::Supported() {
  bool supported = false;
  std::thread([&] {
    if (unshare(CLONE_NEWNET) != 0) return;
    int tun = OpenTun("", IFF_VNET_HDR);
    supported = tun >= 0;
    close(tun);
  }).join();
  return supported;
}

EmulatedLink::EmulatedLink() {
  CHECK(unshare(CLONE_NEWNET) == 0) << "unshare";
  ends_[0] = MakeEnd("10.77.0.1");
  OnNewHost(other_host_, [this] { ends_[1] = MakeEnd("10.77.0.2"); });
  for (int n : {0, 1}) {
    directions_[n] = std::make_unique<Direction>(ends_[n], ends_[1 - n], static_cast<uint64_t>(n));
  }
}

EmulatedLink::~EmulatedLink() {
  for (auto& direction : directions_) direction.reset();
  for (int end : ends_) close(end);
  close(other_host_);
}

void EmulatedLink::Change(const Options& options) {
  for (auto& direction : directions_) direction->Use(options);
}

void EmulatedLink::OnOtherHost(const std::function<void()>& work) {
  std::thread([&] {
    CHECK(setns(other_host_, CLONE_NEWNET) == 0) << "setns";
    work();
  }).join();
}

int64_t EmulatedLink::dropped() const {
  return directions_[0]->dropped() + directions_[1]->dropped();
}
int64_t EmulatedLink::overtook() const {
  return directions_[0]->overtook() + directions_[1]->overtook();
}

}  // namespace attnd
