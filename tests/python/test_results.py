"""A REPL shows and takes these: results, tracebacks, names, types."""
import os
import pickle
import re
import subprocess
import sys
import traceback

import numpy as np
import pytest

import attnd
from conftest import SOURCE

Q = np.random.default_rng(1).standard_normal((2, 4, 16, 8), np.float32)


def test_results_unpack_and_say_what_they_are(client):
    result = client.forward(Q, Q, Q)
    out, lse = result
    assert out is result.out and lse is result.lse
    gradients = client.backward(out, result)
    dq, dk, dv = gradients
    assert dq is gradients.dq and dk is gradients.dk and dv is gradients.dv
    kernel = result.receipt.kernel or result.receipt.backend
    assert re.fullmatch(r"ForwardResult\(out=float32\[2, 4, 16, 8\], lse=float32\[2, 4, 16\], "
                        rf"{re.escape(kernel)}, \d[\d.e+-]* ms\)", repr(result)), repr(result)
    assert repr(client.forward(Q, Q, Q, return_lse=False)).startswith(f"ForwardResult(out=float32[2, 4, 16, 8], {kernel}")
    assert re.match(r"Gradients\(dq=float32\[2, 4, 16, 8\], dk=float32\[2, 4, 16, 8\], dv=float32\[2, 4, 16, 8\], ",
                    repr(gradients)), repr(gradients)
    assert repr(pickle.loads(pickle.dumps(result))) == repr(result)


@pytest.mark.parametrize("wrong", [
    lambda client: client.forward(Q, Q[:, :, :, :4], Q),
    lambda client: client.forward(Q, Q, Q, causl=True),
    lambda client: client.forward(Q, Q, Q, timeout=-1),
    lambda client: client.backward(Q, Q, Q, Q, Q, Q),
    lambda client: client.info(7),
    lambda client: attnd.connect("127.0.0.1:1", channels=0),
    lambda client: attnd.connect("127.0.0.1:1").forward(Q, Q, Q),
])
def test_at_most_two_frames_of_ours_stand_above_a_message(client, wrong):
    with pytest.raises(attnd.AttndError) as caught:
        wrong(client)
    frames = [frame for frame in traceback.extract_tb(caught.value.__traceback__)
              if os.path.dirname(frame.filename) == os.path.join(SOURCE, "attnd")]
    assert 1 <= len(frames) <= 2, frames
    assert "During handling" not in "".join(traceback.format_exception(caught.value))


def test_messages_say_the_cure(client):
    with pytest.raises(attnd.InvalidArgument, match=r"\.astype\(np\.float32\) makes one, got an array of float64"):
        client.forward(Q.astype(np.float64), Q, Q)
    with pytest.raises(attnd.InvalidArgument) as caught:
        client.forward(Q.astype(np.complex64), Q, Q)
    assert "astype" not in str(caught.value)
    assert "each process that was spawned too (a DataLoader's worker_init_fn)" in str(attnd.errors.not_connected("x", ""))


def test_dir_is_what_is_for_use():
    assert {name for name in dir(attnd) if not name.startswith("__")} == set(attnd.__all__)


MISTAKES = """import numpy as np
import attnd
client = attnd.connect("127.0.0.1:1", fallback="numpy")
q = np.zeros((1, 1, 1, 8), np.float32)
client.forward(q, q, q, causal="topleft")
client.forward(q, q, q, layout="bldh")
client.forward(q, q, q, precision="fp16")
client.forward(q, q, q, priority="urgent")
client.forward("q", q, q)
client.forward(q, q, q, causal="top_left", layout="blhd", precision="f16", priority="high")
attnd.connect("127.0.0.1:1", fallback="local", precision="auto")
"""


def test_mypy_finds_each_mistake(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "mistakes.py"
    program.write_text(MISTAKES)
    environment = {**os.environ, "MYPYPATH": SOURCE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"),
                           "--follow-imports", "silent", "mistakes.py"], capture_output=True, text=True, cwd=tmp_path,
                          env=environment)
    found = sorted({int(line) for line in re.findall(r"^mistakes\.py:(\d+): error", done.stdout, re.M)})
    assert found == [3, 5, 6, 7, 8, 9], done.stdout + done.stderr
