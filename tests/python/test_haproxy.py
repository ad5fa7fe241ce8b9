"""deploy/haproxy/haproxy.cfg as shipped, run by Debian's haproxy in front of two daemons: calls, streams, cancellation,
drained and killed daemons, limits of an address, and floods by a client that holds a certificate."""
import collections
import concurrent.futures
import itertools
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time

import grpc
import numpy as np
import oracle
import pytest
from conftest import ROOT, Daemon, close
from raw_peer import (CONTINUATION, DATA, END_HEADERS, HEADERS, PING, RESET, SETTINGS, RawPeer, frame, headers,
                      tls_context)
from test_modules import small_layout

import attnd

pytestmark = pytest.mark.rare("haproxy")
GRPC = "application/grpc"
CONFIGURATION = os.path.join(ROOT, "deploy/haproxy/haproxy.cfg")
ATTNCTL = os.path.join(ROOT, "bazel-bin/client/attnctl")
TLS_LINE, TOKENS_LINE = "default-server ssl", "http-request set-header authorization"  # commented out as shipped
MIB = 1 << 20


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A folder as the configuration wants it, and a client's certificate beside it."""
    folder = tmp_path_factory.mktemp("certificates")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-days", "1", "-subj", "/CN=authority", "-keyout", f"{folder}/ca.key", "-out",
            f"{folder}/clients.pem")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "trainer"):
        openssl("req", *new_key, "-subj", f"/CN={name}", "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/request")
        openssl("x509", "-req", "-in", f"{folder}/request", "-CA", f"{folder}/clients.pem", "-CAcreateserial", "-CAkey",
                f"{folder}/ca.key", "-days", "1", "-extfile", f"{folder}/names", "-out", f"{folder}/{name}.crt")
    (folder / "server.pem").write_text((folder / "server.crt").read_text() + (folder / "server.key").read_text())
    for name, source in (("attnd.pem", "clients.pem"), ("proxy.pem", "server.pem")):
        shutil.copy(folder / source, folder / name)
    (folder / "tokens.map").write_text("trainer 0123456789abcdef\n")
    (folder / "tokens").write_text("the-trainer 0123456789abcdef\n")
    return folder


def settings_for(certificates, folder, **more):
    """Makes a site's settings, for a process without rights and without the package's user."""
    identity = {"ATTND_PROXY_USER": subprocess.check_output(["id", "-un"], text=True).strip(),
                "ATTND_PROXY_GROUP": subprocess.check_output(["id", "-gn"], text=True).strip()}
    return {**os.environ, **identity, "ATTND_CERTIFICATES": str(certificates),
            "ATTND_PROXY_SOCKET": f"{folder}/admin.sock", "ATTND_PROXY_METRICS": f"unix@{folder}/metrics.sock", **more}


def configuration_with(options=()):
    """The shipped text; each of its commented lines that begins with one of `options` is switched on."""
    with open(CONFIGURATION) as file:
        text = file.read()
    for option in options:
        assert re.search(rf"^    #{option}", text, re.M), option
        text = re.sub(rf"^    #{option}", f"    {option}", text, flags=re.M)
    return text


def check_configuration(path, environment):
    done = subprocess.run(["haproxy", "-c", "-f", str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "[WARNING]" not in done.stderr, done.stderr


class Proxy:
    """haproxy before `daemons`, with every server looked at once."""

    def __init__(self, certificates, folder, daemons, options=(), module_balance=None, **limits):
        self._certificates, self._socket = certificates, f"{folder}/admin.sock"
        path = folder / "haproxy.cfg"
        text = configuration_with(options).replace("    chroot /var/lib/haproxy\n", "")  # which needs root
        if module_balance is not None:
            text = text.replace("balance hdr(attnd-module)\n    hash-type consistent\n", f"balance {module_balance}\n")
        path.write_text(text)
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            servers = {f"ATTND_{n}": daemon.address for n, daemon in enumerate(daemons, 1)}
            environment = settings_for(certificates, folder, ATTND_BIND=f"fd@{listener.fileno()}", **servers, **limits)
            with open(folder / "log", "w") as log:
                self.process = subprocess.Popen(["haproxy", "-db", "-f", str(path)], env=environment, stdout=log,
                                                stderr=log, pass_fds=[listener.fileno()])
            self.address = f"localhost:{listener.getsockname()[1]}"
        wait_until(lambda: self.process.poll() is not None or set(self.states().values()) == {"UP L7OK"})
        assert self.process.poll() is None, (folder / "log").read_text()

    def ask(self, command):
        with socket.socket(socket.AF_UNIX) as admin:
            try:
                admin.connect(self._socket)
            except (FileNotFoundError, ConnectionRefusedError):
                return ""
            admin.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

    def states(self):
        """{"attnd1": "UP L7OK", ...}; HAProxy marks a check that is under way by "* "."""
        rows = [line.split(",") for line in self.ask("show stat").splitlines()]
        servers = [row for row in rows if row[0] == "attnds" and row[1] != "BACKEND"]
        return {row[1]: f"{row[17]} {row[36].removeprefix('* ')}" for row in servers}

    def tls(self):
        c = self._certificates
        return attnd.TLS(ca=f"{c}/clients.pem", cert=f"{c}/trainer.crt", key=f"{c}/trainer.key")

    def connect(self, **options):
        return attnd.connect(self.address, **{"tls": self.tls(), "timeout": 30, **options})

    def attnctl(self, *arguments):
        ca, cert, key, _ = self.tls()
        return subprocess.run([ATTNCTL, "--address", self.address, "--tls-ca", ca, "--tls-cert", cert, "--tls-key", key,
                               *arguments], capture_output=True, text=True, timeout=60)

    def channel(self):
        return channel_of(self.address, self._certificates)

    def peer(self, source="127.0.0.2"):
        return RawPeer(self.address, tls_context(*self.tls()[:3]), source)

    def stop(self):
        self.process.terminate()
        self.process.wait()


def channel_of(address, certificates):
    """gRPC's own, with the client's certificate."""
    ca, key, cert = ((certificates / name).read_bytes() for name in ("clients.pem", "trainer.key", "trainer.crt"))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert))


def check_header_spreads(proxy, daemons):
    """Each module's calls go to one daemon, over all connections; counted by the daemons."""
    places = collections.defaultdict(set)
    for _ in range(3):
        with proxy.channel() as channel:
            ask = channel.unary_unary("/attnd.v1.Modules/ListModules")
            for number in range(12):
                before = [one.metric("attnd_module_calls_total") for one in daemons]
                ask(b"", metadata=[("attnd-module", f"module-{number}")], timeout=20)
                after = [one.metric("attnd_module_calls_total") for one in daemons]
                (place,) = [n for n in range(2) if after[n] > before[n]]
                places[number].add(place)
    assert all(len(found) == 1 for found in places.values())
    assert set().union(*places.values()) == {0, 1}


# The whole figure: ATTND_TEST_PROXY_SECONDS=300.
PROXY_SECONDS = float(os.environ.get("ATTND_TEST_PROXY_SECONDS", "5"))


def check_trains_without_replay(proxy, daemons):
    """Connections end after two seconds; a module none of whose calls are kept stays at one daemon, and its bits are those
    without a proxy."""
    generator = np.random.default_rng(3)
    weights = {p.name: np.float32(generator.normal(size=p.shape) * 0.2) for p in small_layout().parameters}
    x, dy = np.float32(generator.normal(size=(2, 2, 5, 16)))

    def train(client, goes_on):
        module = attnd.register(small_layout(), client, name="proxied", optimizer=attnd.AdamW(), max_rows=64, replay_mib=0)
        module.put(weights)
        steps = 0
        while goes_on(steps):
            module.backward(dy, module.forward(x, keep=True)[1])
            module.step(lr=1e-3, weight_decay=0.1)
            steps += 1
        made, found = sum(one.metric("attnd_modules") for one in daemons), module.get()
        module.release()
        return made, found, steps
    end = time.monotonic() + PROXY_SECONDS
    with proxy.connect() as client:
        made, found, steps = train(client, lambda _: time.monotonic() < end)
    with attnd.connect(daemons[0].address, timeout=60) as client:
        _, expected, _ = train(client, lambda step: step < steps)
    print(f"{steps} steps in {PROXY_SECONDS:.0f} s")
    assert made == 1 and steps > 10
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def check_is_told_not_sticky(proxy, daemons):
    with proxy.connect() as client:
        with pytest.raises(attnd.FailedPrecondition, match="reach several daemons behind one address") as failed:
            attnd.register(small_layout(), client, name="scattered", max_rows=64, replay_mib=0)
    assert failed.value.reason == "NOT_STICKY"
    assert sum(one.metric("attnd_modules") for one in daemons) == 0


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_daemons(*flags):
    return [Daemon("--memory_limit_mib", "256", "--max_message_mib", "4", *flags) for _ in range(2)]


@pytest.fixture(scope="module")
def daemons():
    made = start_daemons()
    yield made
    for one in made:
        one.stop()


@pytest.fixture(scope="module")
def proxy(certificates, tmp_path_factory, daemons):
    made = Proxy(certificates, tmp_path_factory.mktemp("proxy"), daemons)
    yield made
    made.stop()


@pytest.fixture
def start(certificates, tmp_path):
    """Makes a proxy of a test's own."""
    made = []
    yield lambda daemons, **settings: made.append(Proxy(certificates, tmp_path, daemons, **settings)) or made[0]
    for one in made:
        one.stop()


def tensors(rng, rows=16):
    return [rng.standard_normal((1, 2, n, 64)).astype(np.float32) for n in (rows, 16, 16)]


def requests(daemons, code=r"\w+"):
    """How many have ended so, at all of the daemons."""
    total = 0
    for daemon in daemons:
        try:
            total += daemon.metric(rf'attnd_requests_total\{{code="{code}",method="\w+"\}}')
        except AssertionError:  # none yet
            pass
    return total


# ---- What has to work.

def test_configuration_is_valid_as_shipped(certificates, tmp_path):
    check_configuration(CONFIGURATION, settings_for(certificates, tmp_path))


def test_configuration_is_valid_with_its_commented_lines(certificates, tmp_path):
    path = tmp_path / "haproxy.cfg"
    path.write_text(configuration_with((TOKENS_LINE, "stick-table", "stick on", TLS_LINE)))
    check_configuration(path, settings_for(certificates, tmp_path))


def test_configuration_is_valid_with_daemons_behind_a_name(certificates, tmp_path):
    path, text = tmp_path / "haproxy.cfg", configuration_with(["server-template"])
    text = re.sub(r"^    server attnd\d .*\n", "", text, flags=re.M)
    path.write_text(re.sub(r"^#(resolvers dns|    parse-resolv-conf)$", r"\1", text, flags=re.M))
    assert "\nresolvers dns\n    parse-resolv-conf\n" in path.read_text()
    check_configuration(path, settings_for(certificates, tmp_path))


def test_calls_of_each_client_come_through_and_go_to_both_daemons(proxy, daemons, rng):
    q, k, v = tensors(rng)
    with proxy.connect() as client:
        for _ in range(8):
            close(client.forward(q, k, v).out, oracle.forward(q, k, v).out)
    done = proxy.attnctl("check", "--count", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    done = proxy.attnctl("bench", "--shape", "1,1,4,64", "--concurrency-range", "4", "--duration", "0.3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(requests([daemon], code="OK") > 10 for daemon in daemons)


def test_the_header_spreads_modules_over_daemons_and_keeps_each_at_one(proxy, daemons):
    check_header_spreads(proxy, daemons)


@pytest.fixture
def aged():
    """Their connections end after two seconds."""
    made = start_daemons("--max_connection_age_seconds", "2")
    yield made
    for one in made:
        one.stop()


def test_a_module_without_replay_trains_while_connections_end(start, aged):
    check_trains_without_replay(start(aged), aged)


def test_a_module_without_replay_is_refused_where_the_proxy_keeps_it_nowhere(start, daemons):
    check_is_told_not_sticky(start(daemons, module_balance="roundrobin"), daemons)


def test_large_tensors_are_streamed_both_ways_over_few_connections(proxy, rng):
    """Shards of 8 MiB there and back, above --max_message_mib. A connection with two of them would stand still
    (tune.h2.max-concurrent-streams)."""
    q, k, v = tensors(rng, rows=32768)
    with proxy.connect(channels=2) as client:
        expected, *others = sum(in_threads(4, lambda: [client.forward(q, k, v).out for _ in range(2)]), [])
    for out in others:
        np.testing.assert_array_equal(out, expected)


def in_threads(count, work):
    """Returns what `work` gives in each; an error of one is raised here."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(work) for _ in range(count)]]


def test_cancelled_call_is_cancelled_at_the_daemon(proxy, daemons, rng):
    def stop(progress):
        if progress.bytes_sent > 0:
            raise KeyboardInterrupt
    with proxy.connect() as client, pytest.raises(KeyboardInterrupt):
        client.forward(*(rng.standard_normal((1, 8, 8192, 64)).astype(np.float32) for _ in range(3)), progress=stop)
    wait_until(lambda: requests(daemons, code="CANCELLED") > 0)
    wait_until(lambda: sum(daemon.metric("attnd_admitted_bytes") for daemon in daemons) == 0)


def test_client_without_a_certificate_is_refused(proxy, daemons, rng):
    before = requests(daemons)
    with proxy.connect(tls=proxy.tls().ca, retries=0) as client, pytest.raises(attnd.Unavailable):
        client.forward(*tensors(rng))
    with pytest.raises((ssl.SSLError, ConnectionError)):  # TLS 1.3 tells at the first read
        RawPeer(proxy.address, tls_context(proxy.tls().ca), "127.0.0.1").socket.recv(1)
    assert requests(daemons) == before


def test_daemons_elsewhere_are_reached_by_tls_and_know_the_caller_by_its_certificate(start, certificates, rng):
    q, k, v = tensors(rng)
    c = certificates
    daemons = start_daemons("--tls_cert", f"{c}/server.crt", "--tls_key", f"{c}/server.key", "--tls_client_ca",
                            f"{c}/clients.pem", "--token_file", f"{c}/tokens", "--log_level", "debug")
    try:
        with start(daemons, options=(TLS_LINE, TOKENS_LINE)).connect() as client:
            assert client.forward(q, k, v).out.shape == q.shape
        wait_until(lambda: any("caller=the-trainer" in daemon.read_log() for daemon in daemons))
    finally:
        for one in daemons:
            one.stop()


def test_reason_of_an_error_travels_in_the_trailers(start, certificates, rng):
    daemons = start_daemons("--token_file", str(certificates / "tokens"))
    try:
        with start(daemons).connect() as client, pytest.raises(attnd.Unauthenticated) as caught:
            client.forward(*tensors(rng))
        assert caught.value.reason == "TOKEN_MISSING"
    finally:
        for one in daemons:
            one.stop()


# ---- Daemons that go.

def grows(some, while_grows):
    """Whether `some` get a request while the others answer 50."""
    before, answered = requests(some), requests(while_grows, code="OK")
    wait_until(lambda: requests(while_grows, code="OK") >= answered + 50)
    return requests(some) > before


def test_no_call_fails_while_a_daemon_drains_or_dies(start, rng):
    q, k, v = tensors(rng)
    daemons = start_daemons()
    proxy, over = start(daemons), threading.Event()

    def call():
        done = 0
        with proxy.connect() as client:
            while not over.is_set():
                client.forward(q, k, v)
                done += 1
        return done
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            callers = [pool.submit(call) for _ in range(4)]
            try:
                wait_until(lambda: all(requests([daemon], code="OK") > 20 for daemon in daemons))
                daemons[0].process.send_signal(signal.SIGTERM)
                # NOT_SERVING, though it still answers calls: the proxy has asked for health, not for a connection.
                wait_until(lambda: proxy.states()["attnd1"].startswith("DOWN L7"))
                with attnd.connect(daemons[0].address) as direct:
                    assert not direct.serving() and direct.forward(q, k, v).out.shape == q.shape
                wait_until(lambda: not grows(daemons[:1], while_grows=daemons[1:]))
                assert daemons[0].process.poll() is None  # still within its --drain_delay
                assert daemons[0].process.wait(timeout=30) == 0
                daemons[0].start()
                wait_until(lambda: proxy.states()["attnd1"] == "UP L7OK")
                wait_until(lambda: requests(daemons[:1], code="OK") > 20)
                daemons[1].kill()
                assert grows(daemons[:1], while_grows=daemons[:1])
            finally:
                over.set()
            assert all(caller.result() > 0 for caller in callers)
    finally:
        for one in daemons:
            one.stop()


def test_all_daemons_gone_is_unavailable_in_words(start, daemons, rng):
    proxy = start(daemons)
    proxy.ask("disable server attnds/attnd1; disable server attnds/attnd2")
    with proxy.connect(retries=0) as client, pytest.raises(attnd.Unavailable, match="proxy: no attnd is serving"):
        client.forward(*tensors(rng))


# ---- Limits of one address.

def test_connections_above_the_limit_are_closed_and_another_address_is_served(start, daemons, rng):
    proxy = start(daemons, ATTND_ADDRESS_CONNECTIONS="5")
    peers = [proxy.peer() for _ in range(5)]
    for _ in range(3):
        with pytest.raises((ssl.SSLError, OSError)):
            proxy.peer()
    with proxy.connect(channels=1) as client:  # 127.0.0.1, with a connection for small calls beside it
        client.forward(*tensors(rng))
    for peer in peers:
        peer.close()
    wait_until(lambda: "conn_cur=5" not in proxy.ask("show table attnd"))
    proxy.peer().close()


def test_requests_above_the_limit_are_unavailable_in_words(start, daemons, rng):
    with start(daemons, ATTND_ADDRESS_REQUESTS="30").connect(retries=0) as client:
        with pytest.raises(attnd.Unavailable, match="proxy: too much from this address"):
            for _ in range(40):
                client.forward(*tensors(rng))


def test_bytes_above_the_limit_are_unavailable(start, daemons, rng):
    with start(daemons, ATTND_ADDRESS_BYTES="1000000").connect(retries=0) as client:
        with pytest.raises(attnd.Unavailable, match="proxy: too much|RST_STREAM"):  # the tensors are still on their way
            for _ in range(40):
                client.forward(*tensors(rng, rows=4096))


@pytest.mark.parametrize("fields", [{"content-type": "text/plain"}, {"content-type": GRPC, "x-large": "a" * 8000}])
def test_request_that_is_no_call_or_has_large_headers_ends_at_the_proxy(proxy, fields):
    status_400 = 0x80 + 12  # in HPACK's table
    peer = proxy.peer()
    peer.send(frame(HEADERS, END_HEADERS, 1, headers(fields)))
    assert peer.answer(1)[0] == status_400
    peer.close()


# ---- Floods. A client that holds a certificate sends from an address of its own; another client's calls go on.

def flood_headers(peer):
    peer.send(frame(HEADERS, 0, 1, headers({"content-type": GRPC})))
    while True:
        peer.send(frame(CONTINUATION, 0, 1, headers({f"x-{n}": "v" * 90 for n in range(150)})))


def flood_empty_headers(peer):
    peer.send(frame(HEADERS, 0, 1, headers({"content-type": GRPC})))
    while True:
        peer.send(1000 * frame(CONTINUATION, 0, 1))


def flood_resets(peer):
    block, stream = headers({"content-type": GRPC}), 1
    while True:
        peer.send(b"".join(frame(HEADERS, END_HEADERS, s, block) + frame(RESET, 0, s, bytes((0, 0, 0, 8)))
                           for s in range(stream, stream + 200, 2)))
        stream += 200


def flood_pings(peer):
    while True:
        peer.send(1000 * frame(PING, 0, 0, b"12345678"))


def flood_settings(peer):
    while True:
        peer.send(1000 * frame(SETTINGS))


def flood_slowly(peer):
    peer.send(frame(HEADERS, END_HEADERS, 1, headers({"content-type": GRPC})))
    while True:
        peer.send(frame(DATA, 0, 1, b"\0"))
        time.sleep(0.05)


class Flood:
    """`count` connections that do `what` until they are closed or no longer read, and then come again. Each flood has an
    address of its own, since the proxy refuses one for a while after much abuse."""

    addresses = itertools.count(2)

    def __init__(self, proxy, what, count):
        self._proxy, self._what, self._over, self.sent = proxy, what, False, 0
        self._source = f"127.0.1.{next(self.addresses)}"
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def _run(self):
        while not self._over:
            try:
                peer = self._proxy.peer(self._source)
            except OSError:  # refused
                time.sleep(0.05)
                continue
            peer.goes_on = lambda: not self._over
            try:
                self._what(peer)
            except OSError:
                pass
            self.sent += peer.sent
            peer.close()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._over = True
        for thread in self._threads:
            thread.join()


def resident_bytes(daemons):
    return sum(daemon.metric("process_resident_memory_bytes") for daemon in daemons)


@pytest.mark.parametrize("what, count, least_sent", [
    (flood_headers, 4, MIB), (flood_empty_headers, 4, MIB // 4), (flood_resets, 4, MIB // 4),
    (flood_pings, 4, MIB // 4), (flood_settings, 4, MIB // 4), (flood_slowly, 60, 1000)])
def test_others_are_answered_beside_a_flood(proxy, daemons, rng, what, count, least_sent):
    q, k, v = tensors(rng)
    with proxy.connect(timeout=20) as client:
        client.forward(q, k, v)
        before = resident_bytes(daemons)
        with Flood(proxy, what, count) as flood:
            end, calls = time.monotonic() + 1.5, 0
            while time.monotonic() < end or calls < 5:
                client.forward(q, k, v)
                calls += 1
            assert resident_bytes(daemons) - before < 64 * MIB
    assert flood.sent > least_sent
    assert set(proxy.states().values()) == {"UP L7OK"}
