"""HTTP/2 byte by byte over TLS, for what no gRPC client would send (RFC 9113 frames, RFC 7541 literal headers)."""
import socket
import ssl

DATA, HEADERS, RESET, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_HEADERS = 4


def frame(kind, flags=0, stream=0, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def text(value):
    size, prefix = len(value), bytearray()
    if size < 127:
        prefix.append(size)
    else:
        prefix.append(127)
        size -= 127
        while size >= 128:
            prefix.append(size % 128 + 128)
            size //= 128
        prefix.append(size)
    return bytes(prefix) + value.encode()


def headers(fields):
    """Those of a streamed call, and `fields`, as literals that are not indexed."""
    call = {":method": "POST", ":scheme": "https", ":path": "/attnd.v1.Attention/ForwardStream", ":authority": "test",
            "te": "trailers"}
    return b"".join(b"\0" + text(name) + text(value) for name, value in {**call, **fields}.items())


def tls_context(ca, cert=None, key=None):
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context


class RawPeer:
    """A connection to `address`, greeted, from the address `source` of this host. OSError when it ends or has not been
    read for half a second."""

    def __init__(self, address, context, source):
        host, port = address.split(":")
        plain = socket.create_connection(("127.0.0.1", int(port)), timeout=5, source_address=(source, 0))
        self.socket = context.wrap_socket(plain, server_hostname=host)
        self.sent, self.goes_on = 0, lambda: True
        self.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
        self.socket.settimeout(0.5)

    def send(self, data):
        if not self.goes_on():
            raise ConnectionAbortedError
        self.socket.sendall(data)
        self.sent += len(data)

    def answer(self, stream):
        """The first block of headers for that stream."""
        with self.socket.makefile("rb") as file:
            while True:
                size, kind, of = file.read(3), file.read(2)[0], int.from_bytes(file.read(4), "big")
                payload = file.read(int.from_bytes(size, "big"))
                if kind == HEADERS and of == stream:
                    return payload

    def close(self):
        self.socket.close()
