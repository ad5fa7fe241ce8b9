"""The status page as a browser shows it: Chromium's headless shell renders it, and once more after its second look."""
import os
import re
import shutil
import subprocess
import urllib.request

import numpy as np
import pytest
from conftest import ROOT, Daemon
from test_modules import small_layout

import attnd

BROWSER = next(filter(None, map(shutil.which, ["chromium-headless-shell", "chromium", "google-chrome"])), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium-headless-shell")
MOST_BYTES = 50_000


@pytest.fixture(scope="module")
def busy():
    """A daemon, its page's address, and calls of two callers while the tests run."""
    made = Daemon()
    port = made.metrics_port
    q = np.zeros((1, 2, 64, 32), np.float32)
    with attnd.connect(made.address) as client:
        for _ in range(20):
            client.forward(q, q, q, causal="top_left")
        module = attnd.register(small_layout(), client, name="page", max_rows=64)
        module.put({p.name: np.zeros(p.shape, np.float32) for p in module.layout.parameters})
        module.forward(np.ones((1, 4, 16), np.float32))
        yield made, f"http://127.0.0.1:{port}/"
    made.stop()


def browse(address, tmp_path, *options):
    """Returns what Chromium prints of it after six virtual seconds: the page looks every two."""
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                           "--no-proxy-server", f"--user-data-dir={tmp_path}", "--window-size=1000,900",
                           "--virtual-time-budget=6000", *options, address],
                          capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done


def text_of(html):
    """Tables and tiles as lists of words, without tags and the script."""
    html = re.sub(r"(?s)<(script|style).*?</\1>", "", html)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


@pytest.mark.rare("status page in Chromium")
@needs_browser
def test_browser_shows_state_devices_callers_and_latency(busy, tmp_path):
    _, address = busy
    page = browse(address, tmp_path, "--dump-dom").stdout
    text = text_of(page)
    version = re.search(r'kVersion = "(.*?)"', open(os.path.join(ROOT, "base/version.h")).read()).group(1)
    assert "attnd serving" in text and f"version {version}" in text, text
    assert re.search(r"Devices .*cpu.* yes ", text), text
    assert re.search(r"Callers .*127\.0\.0\.1|Callers .*loopback", text), text
    forward = re.search(r"Forward(?:Stream)? ([\d,]+) (\d+) ", text)
    assert forward and int(forward.group(1)) >= 20 and forward.group(2) == "0", text
    assert re.search(r"(ms|µs)", text.split("Methods ")[1].split(" Modules: ")[0]), text
    assert re.search(r"Modules: .* GFLOP/s 1 registered [\d.]+ KiB .* Forward 1 0 0 [\d.]+ (ms|µs) ", text), text
    assert '<div id="offloaded">' in page  # without "hidden"
    # The second look has rates, where the first has dashes.
    assert re.search(r"calls a second \d", text), text
    assert page.count(",") and "<polyline" in page and re.search(r'points="\d', page)


@pytest.mark.rare("status page in Chromium")
@needs_browser
def test_browser_sees_that_the_daemon_is_gone(tmp_path):
    """The page stays and says so: it is kept in a file and asks a port where nobody listens."""
    with open(os.path.join(ROOT, "server/app/status_page.html")) as file:
        page = file.read().replace('fetch("metrics"', 'fetch("http://127.0.0.1:1/metrics"')
    path = tmp_path / "page.html"
    path.write_text(page)
    text = text_of(browse(path.as_uri(), tmp_path / "profile", "--dump-dom").stdout)
    assert "attnd no answer" in text, text


def test_page_is_small_and_asks_nobody_else(busy):
    _, address = busy
    with urllib.request.urlopen(address, timeout=10) as answer:
        page = answer.read()
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    assert 1000 < len(page) <= MOST_BYTES
    assert not re.search(rb"https?://", page)
