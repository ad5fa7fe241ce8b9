"""A daemon that is down, killed, restarted, stopped; time limits, Ctrl-C, threads and forks."""
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import Daemon

import attnd
from attnd._call import Call
from attnd.errors import from_status


def tensors(rng, *shape):
    return [rng.standard_normal(shape or (2, 2, 16, 8)).astype(np.float32) for _ in range(3)]


def test_no_daemon_says_where_it_looked_and_what_to_do(native_library, rng):
    with attnd.connect(["127.0.0.1:1", "127.0.0.1:2"], timeout=5) as client, pytest.raises(attnd.Unavailable) as caught:
        client.forward(*tensors(rng))
    assert "127.0.0.1:1" in str(caught.value) and "is attnd running there, without TLS?" in str(caught.value)


def test_a_folder_or_file_without_addresses_is_named(native_library, tmp_path):
    empty, missing = tmp_path / "empty", tmp_path / "missing"
    empty.mkdir()
    (empty / ".hidden").write_text("gpu1:7070\n")
    (empty / "port").write_text("7070\n")
    listed = tmp_path / "listed"
    listed.write_text("127.0.0.1:1\n")
    for address, words in ((f"dir:{missing}", f"there is no folder {missing}"),
                           (f"file:{missing}", f"there is no file {missing}"),
                           (f"dir:{empty}", f"no file in the folder {empty} has a line host:port"),
                           (f"file:{empty / 'port'}", f"the file {empty / 'port'} does not have a line host:port"),
                           (f"file:{listed}", "is attnd running there")):
        with attnd.connect(address, timeout=10, retries=0) as client, pytest.raises(attnd.Unavailable) as caught:
            client.info()
        assert words in str(caught.value), caught.value
        assert caught.value.reason == ("UNREACHABLE" if "running" in words else "NO_ADDRESS")
    with attnd.connect(f"dir:{missing}", timeout=1, wait_for_ready=True) as client, \
            pytest.raises(attnd.DeadlineExceeded, match="there is no folder"):
        client.info()


def test_error_of_a_server_says_what_to_do_below_its_message():
    error = attnd.OutOfRange("limits.max_rows: expected less", reason="MODULE_TOO_LARGE")
    assert str(error) == error.message and error.what_to_do.startswith("Set smaller limits (max_rows)")
    note = "MODULE_TOO_LARGE: " + error.what_to_do
    assert getattr(error, "__notes__", [note]) == [note]
    wrong = attnd.InvalidArgument("q: expected 4 dimensions", reason="BAD_SHAPE")  # its message says it
    assert wrong.what_to_do == "" and not hasattr(wrong, "__notes__")


def test_fallback_computes_locally_and_warns(native_library, rng):
    q, k, v = tensors(rng)
    with attnd.connect("127.0.0.1:1", timeout=5, retries=0, fallback="local") as client:
        with pytest.warns(RuntimeWarning, match="computing locally"):
            r = client.forward(q, k, v, causal="top_left")
        with pytest.warns(RuntimeWarning, match="computing locally"):
            g = client.backward(r.out, q, k, v, r.out, r.lse.copy(), causal="top_left",
                                bias=np.zeros((16, 16), np.float32), bias_grad=True)
    expected = attnd.local.forward(q, k, v, causal="top_left")
    np.testing.assert_array_equal(r.out, expected.out)
    assert r.receipt.backend == "local" and g.dbias.shape == (16, 16)


def test_fallback_computes_a_known_small_call_too(client, rng):
    q, k, v = tensors(rng, 1, 1, 3, 5)
    client.forward(q, k, v)
    with attnd.connect("127.0.0.1:1", timeout=5, retries=0, fallback="local") as nobody:
        with pytest.warns(RuntimeWarning, match="computing locally") as warned:
            r = nobody.forward(q, k, v)
    assert r.receipt.backend == "local" and warned[0].filename == __file__
    np.testing.assert_allclose(r.out, client.forward(q, k, v).out, rtol=1e-4, atol=1e-5)


def test_killed_daemon_is_unavailable_and_its_successor_serves_the_same_client(own_daemon, rng):
    q, k, v = tensors(rng)
    with attnd.connect(own_daemon.address, timeout=30, retries=0) as client:
        before, epoch = client.forward(q, k, v).out, client.info().boot_epoch
        own_daemon.kill()
        with pytest.raises(attnd.Unavailable):
            client.forward(q, k, v)
        own_daemon.start()
        with attnd.connect(own_daemon.address, timeout=30, wait_for_ready=True) as waiting:
            np.testing.assert_array_equal(waiting.forward(q, k, v).out, before)
            assert waiting.info().boot_epoch != epoch


def test_drained_daemon_ends_well_and_is_unavailable_afterwards(own_daemon, rng):
    q, k, v = tensors(rng)
    with attnd.connect(own_daemon.address, timeout=30, retries=0) as client:
        client.forward(q, k, v)
        assert own_daemon.kill(signal.SIGTERM) == 0
        with pytest.raises(attnd.Unavailable):
            client.forward(q, k, v)


def test_waiting_client_outlives_a_restart(own_daemon, rng):
    q, k, v = tensors(rng)
    with attnd.connect(own_daemon.address, timeout=60, wait_for_ready=True) as client:
        before = client.forward(q, k, v).out
        own_daemon.kill()
        restart = threading.Timer(0.5, own_daemon.start)
        restart.start()
        np.testing.assert_array_equal(client.forward(q, k, v).out, before)
        restart.join()


def test_stopped_daemon_ends_in_deadline_exceeded(own_daemon, rng):
    q, k, v = tensors(rng)
    with attnd.connect(own_daemon.address, timeout=30) as client:
        client.forward(q, k, v)
        own_daemon.pause()
        begin = time.monotonic()
        with pytest.raises(attnd.DeadlineExceeded) as caught:
            client.forward(q, k, v, timeout=0.3)
        assert isinstance(caught.value, TimeoutError) and time.monotonic() - begin < 20


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("peer", ["silent", "closed", "talks otherwise"])
def test_what_is_no_daemon_gives_one_sentence_in_time(native_library, rng, peer, waits):
    """A port that accepts and says nothing, one that hangs up, one that speaks something else."""
    given, stop = tensors(rng), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def serve():
            held = []
            while not stop.is_set():
                try:
                    held.append(server.accept()[0])
                except TimeoutError:
                    continue
                if peer == "talks otherwise":
                    held[-1].sendall(b"HTTP/1.0 400 Bad request\r\n\r\n" * 9)
                if peer != "silent":
                    held.pop().close()

        thread = threading.Thread(target=serve)
        thread.start()
        address, begin = f"127.0.0.1:{server.getsockname()[1]}", time.monotonic()
        try:
            with attnd.connect(address, timeout=1.5, wait_for_ready=waits) as client:
                with pytest.raises(attnd.AttndError) as caught:
                    client.forward(*given)
            assert time.monotonic() - begin < 20 and address in str(caught.value)
            if waits or peer == "silent":
                assert isinstance(caught.value, attnd.DeadlineExceeded) and caught.value.reason == "TIMEOUT"
                assert "no answer" in str(caught.value) and "within 1.5 s" in str(caught.value)
            else:
                assert isinstance(caught.value, attnd.Unavailable) and "is attnd running there" in str(caught.value)
        finally:
            stop.set()
            thread.join()


def test_older_server_is_told_from_a_wrong_argument(client, rng, monkeypatch):
    given = tensors(rng)

    def answer(*_):
        raise from_status(3, "problem.field_99: expected a field of attnd.v1.Problem that this server knows, got number 99",
                          reason="UNKNOWN_FIELD", metadata={"field": "problem.field_99"})

    monkeypatch.setattr(Call, "run", answer)
    says = "is an older attnd than this client .* install the wheel of its version"
    with pytest.raises(attnd.Unimplemented, match=says) as caught:
        client.forward(*given)
    assert caught.value.reason == "UNKNOWN_FIELD" and client.addresses[0] in str(caught.value)


def test_nothing_is_written_to_standard_error(daemon):
    program = """
import sys, numpy as np, attnd
q = np.ones((1, 1, 4, 8), np.float32)
try:
    attnd.connect(sys.argv[1], tls=True, timeout=5).forward(q, q, q)
except attnd.Unavailable as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", program, daemon.address], capture_output=True, text=True, timeout=60,
                          env=environment)
    assert "is attnd running there, with TLS?" in done.stdout and done.stderr == ""


@pytest.fixture
def keyboard_interrupt():
    """Python's own handler of Ctrl-C, which a shell's background job is started without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_cancels_the_call(own_daemon, rng, keyboard_interrupt):
    q, k, v = tensors(rng)
    with attnd.connect(own_daemon.address, timeout=60) as client:
        client.forward(q, k, v)
        own_daemon.pause()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            client.forward(q, k, v)
        assert time.monotonic() - begin < 30
        own_daemon.process.send_signal(signal.SIGCONT)
        client.forward(q, k, v)


@pytest.mark.parametrize("call", ["forward", "info", "retries", "twice"])
def test_signal_handlers_run_while_a_call_waits(own_daemon, rng, call):
    """Whatever a handler raises ends the call; here a class of our own, by SIGALRM."""
    class Alarm(BaseException):
        pass

    def ring(number, frame):
        raise Alarm

    given = tensors(rng)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        address = "127.0.0.1:1" if call == "retries" else own_daemon.address
        with attnd.connect(address, timeout=60, wait_for_ready=call == "retries") as client:
            own_daemon.pause()
            signal.setitimer(signal.ITIMER_REAL, 0.2, 0.06 if call == "twice" else 0)
            begin = time.monotonic()
            with pytest.raises(Alarm):
                client.info() if call == "info" else client.forward(*given)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert time.monotonic() - begin < 30
    except Alarm:  # the last of several, between two lines here
        assert call == "twice"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_handler_that_raises_nothing_lets_the_call_go_on(own_daemon, rng):
    ran, given = [], tensors(rng)
    before = signal.signal(signal.SIGALRM, lambda *_: (ran.append(time.monotonic()),
                                                       own_daemon.process.send_signal(signal.SIGCONT)))
    try:
        with attnd.connect(own_daemon.address, timeout=60) as client:
            expected = client.forward(*given).out
            own_daemon.pause()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            np.testing.assert_array_equal(client.forward(*given).out, expected)
            assert len(ran) == 1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_progress_is_told_in_any_thread_and_at_the_end(client, rng):
    given, told = tensors(rng, 4, 4, 256, 64), {}

    def work():
        seen = told[threading.current_thread().name] = []
        client.forward(*given, progress=seen.append)

    work()
    other = threading.Thread(target=work, name="other")
    other.start()
    other.join(60)
    assert len(told) == 2 and all(seen[-1].shards_done == seen[-1].shards_total > 0 for seen in told.values())


def test_large_call_looks_around_while_it_asks_servers_for_their_limits(native_library, rng):
    """Which a call does before its first shard, for as long as nobody answers; Ctrl-C and progress wait no longer."""
    told = []
    with attnd.connect("127.0.0.1:1", timeout=1, wait_for_ready=True) as client:
        with pytest.raises(attnd.DeadlineExceeded):
            client.forward(*tensors(rng, 4, 8, 512, 64), progress=told.append)
    assert len(told) >= 4  # of some twenty; none when the question is waited for in one go


def test_exception_in_progress_function_cancels_the_call(client, rng):
    def fail(progress):
        raise RuntimeError("enough")
    with pytest.raises(RuntimeError, match="enough"):
        client.forward(*tensors(rng, 4, 4, 256, 64), progress=fail)


def test_threads_share_a_client(client, rng):
    cases = [(tensors(rng, 2, 2, 10 + n, 8), n) for n in range(8)]
    expected = [client.forward(*given, causal="top_left", dropout_p=0.2, seed=seed).out for given, seed in cases]
    wrong = []

    def work(index):
        given, seed = cases[index]
        for _ in range(10):
            got = client.forward(*given, causal="top_left", dropout_p=0.2, seed=seed).out
            if not np.array_equal(got, expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)


FORK = """
import os, sys
import numpy as np
import attnd

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 2, 16, 8)).astype(np.float32)
client = attnd.connect(sys.argv[1], timeout=30)
expected = client.forward(q, k, v).out

def family(depth):
    children = []
    for _ in range(2 if depth else 0):
        child = os.fork()
        if child == 0:
            same = np.array_equal(client.forward(q, k, v).out, expected)
            family(depth - 1)
            same = same and np.array_equal(client.forward(q, k, v).out, expected)
            sys.stdout.write("same\\n" if same else "different\\n")
            sys.stdout.flush()
            sys.exit(0 if same else 1)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(3)

family(2)
assert np.array_equal(client.forward(q, k, v).out, expected)
"""


def test_forked_children_and_their_children_connect_anew(daemon):
    done = subprocess.run([sys.executable, "-c", FORK, daemon.address], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["same"] * 6), done.stderr


def test_interpreter_ends_while_clients_are_open(daemon):
    program = "import attnd, sys; c = attnd.connect(sys.argv[1]); c.info(); d = attnd.connect(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, daemon.address], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_unix_socket_and_token(tmp_path, rng):
    tokens = tmp_path / "tokens"
    tokens.write_text("trainer s3cret-s3cret-s3cret\n")
    tokens.chmod(0o600)
    path = f"unix:{tmp_path}/attnd.sock"
    made = Daemon("--token_file", str(tokens), "--listen", path)
    try:
        with attnd.connect(path, token="s3cret-s3cret-s3cret", timeout=30) as client:
            client.forward(*tensors(rng))
        with attnd.connect(path, token="wrong", timeout=30) as client, pytest.raises(attnd.Unauthenticated) as caught:
            client.forward(*tensors(rng))
        assert isinstance(caught.value, PermissionError)
    finally:
        made.stop()
