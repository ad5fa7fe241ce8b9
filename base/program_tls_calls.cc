// OpenSSL's functions of a program that links this, for gRPC within it: what a TLS connection
// brings is counted as what any other does (payload_receiver.h). gRPC 1.51 keeps TLS apart from
// sockets (a pair of memory BIOs), but begins it while it is given the connection, on that thread.
// Source: gRPC 1.51, src/core/tsi/ssl_transport_security.cc, secure_endpoint.cc and
// ext/transport/chttp2/server/chttp2_server.cc.
#include <dlfcn.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/payload_receiver.h"

namespace attnd {
namespace {

using Connection = std::shared_ptr<PayloadReceiver>;

void Forget(void*, void* connection, CRYPTO_EX_DATA*, int, long, void*) {
  delete static_cast<Connection*>(connection);
}

// Where OpenSSL keeps what belongs to a connection.
int Place() {
  static const int place = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, Forget);
  return place;
}

void Begin(SSL* ssl) {
  Connection connection = PayloadReceiver::BeginTls();
  if (connection != nullptr) SSL_set_ex_data(ssl, Place(), new Connection(std::move(connection)));
}

PayloadReceiver* ConnectionOf(const SSL* ssl) {
  auto* connection = static_cast<Connection*>(SSL_get_ex_data(ssl, Place()));
  return connection == nullptr ? nullptr : connection->get();
}

template <class Function>
Function* Next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace
}  // namespace attnd

extern "C" {

SSL* SSL_new(SSL_CTX* context) {
  static auto* const next = attnd::Next(&SSL_new, "SSL_new");
  SSL* ssl = next(context);
  if (ssl != nullptr) attnd::Begin(ssl);
  return ssl;
}

int SSL_read(SSL* ssl, void* to, int size) {
  static auto* const next = attnd::Next(&SSL_read, "SSL_read");
  const int got = next(ssl, to, size);
  if (auto* connection = attnd::ConnectionOf(ssl)) {
    connection->Decrypted({static_cast<const uint8_t*>(to), static_cast<size_t>(std::max(got, 0))});
  }
  return got;
}

int SSL_write(SSL* ssl, const void* from, int size) {
  static auto* const next = attnd::Next(&SSL_write, "SSL_write");
  if (auto* connection = attnd::ConnectionOf(ssl)) connection->BeginToAnswer();
  return next(ssl, from, size);
}

}  // extern "C"
