// A peer that speaks HTTP/2 byte by byte and lets no byte of a reply through, and the methods that
// the daemon has.
#pragma once

#include <google/protobuf/descriptor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/module.pb.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/raw_http2.h"

namespace attnd {

// "/attnd.v1.Attention/Forward" and the like: all that the protos say.
inline std::vector<std::string> AllMethods() {
  std::vector<std::string> methods;
  for (const google::protobuf::FileDescriptor* file :
       {v1::ForwardRequest::descriptor()->file(), v1::PutTensorsHeader::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        methods.push_back(absl::StrCat("/", file->service(s)->full_name(), "/",
                                       file->service(s)->method(m)->name()));
      }
    }
  }
  return methods;
}

// A connection whose HTTP/2 window for each stream is 0: nothing of a reply may be sent on it.
inline std::unique_ptr<RawHttp2> Shut(const Daemon& daemon,
                                      const std::string& source = "127.0.0.1") {
  auto peer = std::make_unique<RawHttp2>(daemon.address(), nullptr, source);
  peer->Greet();
  peer->Send(RawHttp2::kSettings, 0, 0, std::string("\0\x04\0\0\0\0", 6));
  while (!peer->acknowledged()) peer->Read(100);
  return peer;
}

inline std::string Prefixed(const std::string& message) {
  return RawHttp2::MessagePrefix(static_cast<uint32_t>(message.size())) + message;
}

// All of `bytes`, however long the windows take.
inline void SendAll(RawHttp2& peer, uint32_t stream, absl::string_view bytes) {
  for (size_t at = 0; at < bytes.size() && !peer.ended();) {
    at += peer.SendData(stream, bytes.substr(at));
    if (at < bytes.size()) peer.Read(10);
  }
}

inline void HalfClose(RawHttp2& peer, uint32_t stream) {
  peer.Send(RawHttp2::kData, RawHttp2::kEndStream, stream, "");
}

inline void Ask(RawHttp2& peer, uint32_t stream, const std::string& method,
                const std::string& request, const RawHttp2::Headers& headers = {},
                bool ends = true) {
  peer.StartCall(stream, method, headers);
  SendAll(peer, stream, Prefixed(request));
  if (ends) HalfClose(peer, stream);
}

// Until the daemon has taken notice of all that was sent.
inline void Settle(RawHttp2& peer) {
  const int pongs = peer.pongs();
  peer.Send(RawHttp2::kPing, 0, 0, "12345678");
  while (peer.pongs() == pongs && !peer.ended()) peer.Read(100);
}

}  // namespace attnd
