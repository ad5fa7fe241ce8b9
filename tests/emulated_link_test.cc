#include "tests/emulated_link.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>

#include <cstring>
#include <string>
#include <vector>

namespace attnd {
namespace {

constexpr size_t kVirtio = 10, kIpAt = kVirtio, kTcpAt = kIpAt + 20, kPayloadAt = kTcpAt + 20;
constexpr uint32_t kSequence = 0xfffffff0;  // it wraps within the segment

// Of `payload` bytes in packets of `each`.
LinkSegment Segment(size_t payload, uint16_t each) {
  LinkSegment segment(kPayloadAt + payload);
  segment[1] = 1;  // TCP over IPv4
  std::memcpy(&segment[4], &each, sizeof(each));
  iphdr ip{};
  ip.version = 4;
  ip.ihl = 5;
  ip.tot_len = htons(static_cast<uint16_t>(segment.size() - kVirtio));
  std::memcpy(&segment[kIpAt], &ip, sizeof(ip));
  tcphdr tcp{};
  tcp.seq = htonl(kSequence);
  tcp.doff = 5;
  std::memcpy(&segment[kTcpAt], &tcp, sizeof(tcp));
  for (size_t n = 0; n < payload; ++n) segment[kPayloadAt + n] = static_cast<char>(n * 7);
  return segment;
}

uint32_t SumOfWords(const char* bytes, size_t size) {
  uint32_t sum = 0;
  for (size_t n = 0; n < size; n += 2) {
    uint16_t word;
    std::memcpy(&word, bytes + n, sizeof(word));
    sum += word;
  }
  return (sum & 0xffff) + (sum >> 16);
}

void ExpectPayload(const LinkSegment& part, size_t from, size_t bytes, int64_t packets) {
  const LinkSegment whole = Segment(350, 100);
  ASSERT_EQ(part.size(), kPayloadAt + bytes);
  EXPECT_EQ(std::memcmp(&part[kPayloadAt], &whole[kPayloadAt + from], bytes), 0);
  iphdr ip;
  std::memcpy(&ip, &part[kIpAt], sizeof(ip));
  EXPECT_EQ(ntohs(ip.tot_len), part.size() - kVirtio);
  EXPECT_EQ(SumOfWords(&part[kIpAt], sizeof(ip)), 0xffffu);
  tcphdr tcp;
  std::memcpy(&tcp, &part[kTcpAt], sizeof(tcp));
  EXPECT_EQ(ntohl(tcp.seq), kSequence + static_cast<uint32_t>(from));
  EXPECT_EQ(PacketsOf(part), packets);
  EXPECT_EQ(part[1], packets == 1 ? 0 : 1) << "what one packet is called";
}

TEST(EmulatedLink, CutsLostPacketsOutOfASegment) {
  const LinkSegment segment = Segment(350, 100);
  EXPECT_EQ(PacketsOf(segment), 4);
  EXPECT_EQ(WithoutPackets(segment, {}), std::vector<LinkSegment>{segment});
  const auto parts = WithoutPackets(segment, {1});
  ASSERT_EQ(parts.size(), 2u);
  ExpectPayload(parts[0], 0, 100, 1);
  ExpectPayload(parts[1], 200, 150, 2);
  const auto rest = WithoutPackets(segment, {0, 3});
  ASSERT_EQ(rest.size(), 1u);
  ExpectPayload(rest[0], 100, 200, 2);
  EXPECT_TRUE(WithoutPackets(segment, {0, 1, 2, 3}).empty());
}

TEST(EmulatedLink, LosesASegmentOfOnePacketWhole) {
  LinkSegment segment = Segment(80, 100);
  segment[1] = 0;
  EXPECT_EQ(PacketsOf(segment), 1);
  EXPECT_TRUE(WithoutPackets(segment, {0}).empty());
}

}  // namespace
}  // namespace attnd
