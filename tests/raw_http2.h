// RawHttp2: a peer that speaks HTTP/2 byte by byte, for what no gRPC client would send: messages
// that never end, headers without end, streams that are reset as they begin. It keeps to the
// server's windows, since a flow-control error would end the connection before the test begins.
// (RFC 9113 frames, RFC 7541 literal headers)
//
// Threads: one.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "base/check.h"

namespace attnd {

class RawHttp2 {
 public:
  enum Frame : uint8_t {
    kData = 0,
    kHeaders = 1,
    kResetStream = 3,
    kSettings = 4,
    kPing = 6,
    kGoAway = 7,
    kWindowUpdate = 8,
    kContinuation = 9
  };
  static constexpr uint8_t kEndStream = 1, kEndHeaders = 4, kAck = 1;
  using Headers = std::vector<std::pair<std::string, std::string>>;

  // `address`: "127.0.0.1:port"; `source`: the address of this host that it comes from. Sends
  // nothing yet but, with `tls`, its handshake; a refused one has `ended`.
  explicit RawHttp2(absl::string_view address, SSL_CTX* tls = nullptr,
                    const std::string& source = "127.0.0.1") {
    int port = 0;
    CHECK(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(socket_ >= 0) << "out of descriptors";
    sockaddr_in from{};
    from.sin_family = AF_INET;
    CHECK(inet_pton(AF_INET, source.c_str(), &from.sin_addr) == 1);
    CHECK(bind(socket_, reinterpret_cast<sockaddr*>(&from), sizeof(from)) == 0);
    CHECK(connect(socket_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0);
    if (tls == nullptr) return;
    tls_ = SSL_new(tls);
    CHECK(SSL_set_fd(tls_, socket_) == 1);
    ended_ = SSL_connect(tls_) != 1;
  }
  ~RawHttp2() {
    SSL_free(tls_);
    close(socket_);
  }
  RawHttp2(const RawHttp2&) = delete;
  RawHttp2& operator=(const RawHttp2&) = delete;

  void Greet() {
    SendBytes("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    Send(kSettings, 0, 0, "");
  }

  void Send(Frame type, uint8_t flags, uint32_t stream, absl::string_view payload) {
    SendBytes(Encode(type, flags, stream, payload));
  }
  // The same frame `times` times at once.
  void Flood(int times, Frame type, uint8_t flags, uint32_t stream, absl::string_view payload) {
    std::string frames;
    for (int n = 0; n < times; ++n) frames += Encode(type, flags, stream, payload);
    SendBytes(frames);
  }
  static std::string Encode(Frame type, uint8_t flags, uint32_t stream, absl::string_view payload) {
    std::string frame;
    for (int shift : {16, 8, 0}) frame.push_back(static_cast<char>(payload.size() >> shift));
    frame.push_back(static_cast<char>(type));
    frame.push_back(static_cast<char>(flags));
    for (int shift : {24, 16, 8, 0}) frame.push_back(static_cast<char>(stream >> shift));
    frame.append(payload.data(), payload.size());
    return frame;
  }

  // The start of a call.
  void StartCall(uint32_t stream, const std::string& method, const Headers& more = {}) {
    Send(kHeaders, kEndHeaders, stream, CallHeaders(method, more));
  }
  static std::string CallHeaders(const std::string& method, const Headers& more = {}) {
    Headers headers = {{":method", "POST"}, {":scheme", "http"},
                       {":path", method},   {":authority", "test"},
                       {"te", "trailers"},  {"content-type", "application/grpc"}};
    headers.insert(headers.end(), more.begin(), more.end());
    return Encode(headers);
  }
  static std::string Encode(const Headers& headers) {
    std::string block;
    for (const auto& [name, value] : headers) {
      block.push_back(0);  // literal, not indexed, new name
      AppendText(name, block);
      AppendText(value, block);
    }
    return block;
  }

  // The beginning of a gRPC message of `bytes` bytes.
  static std::string MessagePrefix(uint32_t bytes) {
    std::string prefix(1, '\0');
    for (int shift : {24, 16, 8, 0}) prefix.push_back(static_cast<char>(bytes >> shift));
    return prefix;
  }

  // Sends data as far as the windows allow now; what was sent.
  size_t SendData(uint32_t stream, absl::string_view data) {
    ReadWhatIsThere();
    auto [at, first] = stream_windows_.try_emplace(stream, initial_window_);
    int64_t room = std::min(at->second, connection_window_);
    size_t size = std::min(data.size(), static_cast<size_t>(std::max<int64_t>(room, 0)));
    for (size_t done = 0; done < size;) {
      size_t step = std::min<size_t>(size - done, 16384);
      Send(kData, 0, stream, data.substr(done, step));
      done += step;
    }
    at->second -= static_cast<int64_t>(size);
    connection_window_ -= static_cast<int64_t>(size);
    return size;
  }

  // Lets the peer send so many more bytes of a stream.
  void Grant(uint32_t stream, uint32_t bytes) {
    std::string more;
    for (int shift : {24, 16, 8, 0}) more.push_back(static_cast<char>(bytes >> shift));
    Send(kWindowUpdate, 0, 0, more);
    Send(kWindowUpdate, 0, stream, more);
  }

  // As they are, to a peer that speaks TLS too.
  void SendPlain(absl::string_view bytes) {
    CHECK(send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(bytes.size()));
  }

  // Reads and understands what has arrived, without waiting.
  void ReadWhatIsThere() { Read(0); }
  // The same, waiting for at most `ms` for something to arrive.
  void Read(int ms) {
    pollfd waiting{socket_, POLLIN, 0};
    while (!ended_ && (BytesDecrypted() > 0 || poll(&waiting, 1, ms) > 0)) {
      char bytes[65536];
      ssize_t size = tls_ == nullptr ? recv(socket_, bytes, sizeof(bytes), 0)
                                     : SSL_read(tls_, bytes, sizeof(bytes));
      if (size <= 0) {
        ended_ = true;
        return;
      }
      received_.append(bytes, static_cast<size_t>(size));
      while (TakeFrame()) {
      }
      ms = 0;
    }
  }

  bool acknowledged() const { return acknowledged_; }  // the peer's settings
  bool ended() const { return ended_; }                // the peer has closed the connection
  bool going_away() const { return going_away_; }
  int64_t connection_window() const { return connection_window_; }  // that may be sent now
  int pongs() const { return pongs_; }                              // answers to pings
  int pings() const { return pings_; }                              // of the peer
  void DoNotAnswerPings() { answers_pings_ = false; }
  // Of the peer, by their numbers in RFC 9113.
  const std::map<uint32_t, uint32_t>& settings() const { return settings_; }
  int resets() const { return resets_; }    // streams that the peer has reset
  int answers() const { return answers_; }  // HEADERS of the peer
  // The peer has said all of a stream, or reset it.
  bool is_over(uint32_t stream) const { return over_.count(stream) > 0; }
  // DATA that came of a stream.
  int64_t bytes_of(uint32_t stream) const {
    auto bytes = bytes_.find(stream);
    return bytes == bytes_.end() ? 0 : bytes->second;
  }

 private:
  // An integer of HPACK with a prefix of 7 bits, and the text.
  static void AppendText(const std::string& text, std::string& out) {
    size_t size = text.size();
    if (size < 127) {
      out.push_back(static_cast<char>(size));
    } else {
      out.push_back(127);
      for (size -= 127; size >= 128; size /= 128)
        out.push_back(static_cast<char>(size % 128 + 128));
      out.push_back(static_cast<char>(size));
    }
    out.append(text);
  }

  void SendBytes(absl::string_view bytes) {
    while (!bytes.empty() && !ended_) {
      ssize_t size = tls_ == nullptr
                         ? send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL)
                         : SSL_write(tls_, bytes.data(), static_cast<int>(bytes.size()));
      if (size <= 0) {
        ended_ = true;
        return;
      }
      bytes.remove_prefix(static_cast<size_t>(size));
    }
  }

  int BytesDecrypted() const { return tls_ == nullptr ? 0 : SSL_pending(tls_); }

  uint32_t Number(size_t at, int bytes) const {
    uint32_t value = 0;
    for (int n = 0; n < bytes; ++n) {
      value = value << 8 | static_cast<uint8_t>(received_[at + static_cast<size_t>(n)]);
    }
    return value;
  }

  bool TakeFrame() {
    if (received_.size() < 9) return false;
    size_t size = Number(0, 3);
    if (received_.size() < 9 + size) return false;
    uint8_t type = static_cast<uint8_t>(received_[3]), flags = static_cast<uint8_t>(received_[4]);
    uint32_t stream = Number(5, 4);
    const bool ends = (type == kData || type == kHeaders) && (flags & kEndStream) != 0;
    if (ends || type == kResetStream) over_.insert(stream);
    if (type == kSettings && (flags & kAck) == 0) {
      for (size_t at = 9; at + 6 <= 9 + size; at += 6) {
        settings_[Number(at, 2)] = Number(at + 2, 4);
      }
      if (settings_.count(4) > 0) initial_window_ = settings_[4];  // INITIAL_WINDOW_SIZE
      Send(kSettings, kAck, 0, "");
      acknowledged_ = true;
    } else if (type == kWindowUpdate) {
      int64_t more = Number(9, 4);
      if (stream == 0) connection_window_ += more;
      if (stream != 0) stream_windows_.try_emplace(stream, initial_window_).first->second += more;
    } else if (type == kPing && (flags & kAck) == 0) {
      ++pings_;
      if (answers_pings_) Send(kPing, kAck, 0, absl::string_view(received_).substr(9, 8));
    } else if (type == kPing) {
      ++pongs_;
    } else if (type == kGoAway) {
      going_away_ = true;
    } else if (type == kResetStream) {
      ++resets_;
    } else if (type == kHeaders) {
      ++answers_;
    } else if (type == kData) {
      bytes_[stream] += static_cast<int64_t>(size);
    }
    received_.erase(0, 9 + size);
    return true;
  }

  int socket_ = -1;
  SSL* tls_ = nullptr;
  std::string received_;
  bool acknowledged_ = false, ended_ = false, going_away_ = false;
  bool answers_pings_ = true;
  int pongs_ = 0, pings_ = 0, resets_ = 0, answers_ = 0;
  std::map<uint32_t, uint32_t> settings_;
  std::set<uint32_t> over_;
  int64_t initial_window_ = 65535, connection_window_ = 65535;
  std::map<uint32_t, int64_t> stream_windows_, bytes_;
};

}  // namespace attnd
