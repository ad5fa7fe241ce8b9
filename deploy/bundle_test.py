"""The bundle of ./dev bundle, run in an empty root with glibc alone and an empty environment (pytest)."""
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The loader finds $ORIGIN through /proc, which this root does not have; LD_ORIGIN_PATH stands in for it.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LD_ORIGIN_PATH": "/bundle"}
GLIBC = ("ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
         "libresolv.so.2")


@pytest.fixture(scope="module")
def empty_root(tmp_path_factory):
    """A folder with /bundle, glibc and the four things every container has."""
    root = tmp_path_factory.mktemp("root")
    subprocess.run(["deploy/bundle.sh", "--output", str(root / "bundle")], cwd=ROOT, check=True)
    for folder in ("lib64", "lib/x86_64-linux-gnu", "tmp", "dev"):
        (root / folder).mkdir(parents=True)
    for name in GLIBC:
        shutil.copy(f"/lib/x86_64-linux-gnu/{name}", root / "lib/x86_64-linux-gnu")
    shutil.copy("/lib64/ld-linux-x86-64.so.2", root / "lib64")
    (root / "dev/null").write_bytes(b"")
    (root / "dev/urandom").write_bytes(os.urandom(4096))
    return root


def inside(root, *command):
    """The command line that runs `command` with `root` as / (as root, or in a user name space)."""
    chroot = ["chroot", str(root), *command]
    return chroot if os.geteuid() == 0 else ["unshare", "--map-root-user", *chroot]


def run_inside(root, *command):
    return subprocess.run(inside(root, *command), env=ENVIRONMENT, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, timeout=60)


def test_programs_start_with_nothing_installed(empty_root):
    for program in ("attnd", "attnctl"):
        done = run_inside(empty_root, f"/bundle/{program}", "--version")
        assert done.returncode == 0, done.stderr
        assert "0.1.0 (" in done.stdout


def test_replaces_no_folder_but_an_earlier_bundle(tmp_path):
    """Files in a folder that somebody names by mistake stay there."""
    (tmp_path / "letters").write_text("dear")
    done = subprocess.run(["deploy/bundle.sh", "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "name another folder" in done.stderr
    assert (tmp_path / "letters").read_text() == "dear"


def test_a_missing_library_is_noticed(empty_root):
    """The test above rests on this: the programs do load the bundle's libraries."""
    library = glob.glob(str(empty_root / "bundle/lib/libssl.so*"))[0]
    os.rename(library, library + ".away")
    try:
        assert run_inside(empty_root, "/bundle/attnd", "--version").returncode != 0
    finally:
        os.rename(library + ".away", library)


@pytest.mark.parametrize("program", ["attnd", "attnctl"])
def test_what_a_call_runs_through_is_within_the_programs(empty_root, program):
    """gRPC, protobuf and abseil once each: beside a second copy in a library, protobuf would end the process."""
    done = subprocess.run(["ldd", str(empty_root / "bundle" / program)], check=True, capture_output=True, text=True)
    assert not re.findall(r"lib(?:grpc|gpr|upb|address_sorting|protobuf|absl)\S*", done.stdout)
    assert "libssl.so.3" in done.stdout, "OpenSSL stays shared, for its security updates"


def test_documents_and_licences_are_there(empty_root):
    """README's links to documents lead somewhere, and each library's package states its terms, also of those within."""
    bundle = empty_root / "bundle"
    for target in re.findall(r"\]\(((?:docs|examples)[^)#]*)", (bundle / "README.md").read_text()):
        assert (bundle / target).exists(), target
    packages = " ".join(os.listdir(bundle / "licenses"))
    for name in ("libgrpc-dev", "libgrpc++-dev", "libprotobuf-dev", "libabsl-dev", "libcli11-dev", "nlohmann-json3-dev",
                 "libssl3", "libstdc++6", "zlib1g"):
        assert name in packages, packages


def test_each_library_is_in_the_sbom_with_its_terms(empty_root):
    bundle = empty_root / "bundle"
    document = json.loads((bundle / "sbom.cdx.json").read_text())
    shipped = {file["name"]: file["hashes"][0]["content"] for package in document["components"]
               for file in package.get("components", [])}
    libraries = [path for folder in ("lib", "client/lib") for path in (bundle / folder).glob("*.so*")
                 if not path.name.startswith("libattnd_client")]
    assert len(libraries) > 50
    assert shipped == {str(path.relative_to(bundle)): hashlib.sha256(path.read_bytes()).hexdigest() for path in libraries}
    for package in document["components"]:
        assert (bundle / package["licenses"][0]["license"]["name"].removeprefix("see ")).stat().st_size > 100, package


def wait_for(path, process):
    for _ in range(300):
        if path.exists() and path.read_text().strip():
            return path.read_text().strip()
        assert process.poll() is None, "attnd ended early"
        time.sleep(0.1)
    raise AssertionError(f"no {path}")


@pytest.fixture
def address(empty_root):
    """The address of the bundle's daemon, which has to drain afterwards."""
    (empty_root / "tmp/port").unlink(missing_ok=True)
    daemon = subprocess.Popen(
        inside(empty_root, "/bundle/attnd", "--listen", "127.0.0.1:0", "--port_file", "/tmp/port", "--metrics_listen",
               "127.0.0.1:0", "--metrics_port_file", "/tmp/metrics_port", "--backend", "cpu", "--drain_delay", "0"),
        env=ENVIRONMENT, stdin=subprocess.DEVNULL)
    try:
        port = wait_for(empty_root / "tmp/port", daemon)
        yield f"127.0.0.1:{port}"
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=60) == 0


def test_daemon_serves_a_call_and_drains(empty_root, address):
    done = run_inside(empty_root, "/bundle/attnctl", "--address", address, "info")
    assert done.returncode == 0 and "cpu" in done.stdout, done.stdout + done.stderr


# ---- client/: programs in C and C++, compiled against the bundle without Bazel.

COMPILERS = {"C": ["gcc", "-std=c99", "-pedantic"], "C++": ["g++", "-std=c++20", "-x", "c++"]}
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]
CMAKE = """cmake_minimum_required(VERSION 3.18)
project(example {language})
set(CMAKE_C_STANDARD 99)
set(CMAKE_CXX_STANDARD 20)
find_package(attnd {version} REQUIRED)
add_executable(example {source})
target_link_libraries(example attnd::client m)
"""


@pytest.fixture(scope="module")
def client(empty_root, tmp_path_factory):
    """The folder, moved: it works wherever it lies."""
    return shutil.copytree(empty_root / "bundle/client", tmp_path_factory.mktemp("moved") / "client", symlinks=True)


def expect_right(program, address):
    """It computes what it says it should, and fails where nobody listens."""
    environment = {"PATH": ENVIRONMENT["PATH"]}
    done = subprocess.run([program, address], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "row 3: O 1.500, expected 1.500; dV 0.250" in done.stdout, done
    wrong = subprocess.run([program, "127.0.0.1:1"], env=environment, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 1 and "127.0.0.1:1" in wrong.stderr, wrong


@pytest.mark.parametrize("language", COMPILERS)
def test_program_compiles_by_pkg_config(client, address, language, tmp_path):
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "attnd"], check=True, capture_output=True, text=True,
                           env={**os.environ, "PKG_CONFIG_PATH": str(client / "lib/pkgconfig")}).stdout.split()
    program = str(tmp_path / "example")
    subprocess.run([*COMPILERS[language], *WARNINGS, str(client / "example.c"), "-o", program, "-x", "none", *flags, "-lm"],
                   check=True)
    expect_right(program, address)


def configure(client, folder, language, version):
    source = "example.c" if language == "C" else "example.cc"
    shutil.copy(client / "example.c", folder / source)
    text = CMAKE.format(language=language.replace("C++", "CXX"), version=version, source=source)
    (folder / "CMakeLists.txt").write_text(text)
    return subprocess.run(["cmake", "-S", str(folder), "-B", str(folder / "build"), f"-DCMAKE_PREFIX_PATH={client}"],
                          capture_output=True, text=True)


@pytest.mark.parametrize("language", COMPILERS)
def test_program_compiles_by_cmake(client, address, language, tmp_path):
    done = configure(client, tmp_path, language, "0.1")
    assert done.returncode == 0, done.stderr
    subprocess.run(["cmake", "--build", str(tmp_path / "build")], check=True, capture_output=True)
    expect_right(str(tmp_path / "build/example"), address)


@pytest.mark.parametrize("version, fits", [("0.1.0", True), ("0", False), ("0.1.1", False), ("0.2", False), ("1.0", False)])
def test_cmake_refuses_versions_that_are_not_compatible(client, version, fits, tmp_path):
    done = configure(client, tmp_path, "C", version)
    assert (done.returncode == 0) == fits, done.stderr
    assert fits or "attndConfig.cmake, version: 0.1.0" in done.stderr, done.stderr


# ---- share/: manual pages and completion.

def test_each_command_has_a_manual_page(empty_root):
    pages = empty_root / "bundle/share/man"
    help_text = run_inside(empty_root, "/bundle/attnctl", "--help").stdout
    commands = re.findall(r"^  ([a-z]+) ", help_text[help_text.index("Subcommands:"):].split("\n\n")[0], re.M)
    assert {"estimate", "bench", "top"} < set(commands)
    names = {"man8/attnd.8", "man1/attnctl.1", *(f"man1/attnctl-{command}.1" for command in commands)}
    assert {str(path.relative_to(pages)) for path in pages.rglob("*.?")} == names
    for name in names:
        text = (pages / name).read_text()
        assert ".SH NAME\nattn" in text and ".SH OPTIONS" in text and ".SH SYNOPSIS" in text, name
        assert "bazel" not in text and ROOT not in text, name
    assert "\\-\\-max_queue_seconds" in (pages / "man8/attnd.8").read_text()


def test_completion_is_that_of_the_program(empty_root):
    script = (empty_root / "bundle/share/bash-completion/completions/attnctl").read_text()
    assert script == run_inside(empty_root, "/bundle/attnctl", "completion", "bash").stdout
