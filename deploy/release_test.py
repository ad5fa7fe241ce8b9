"""./dev release hands out files that are complete, small and the same twice, and the image runs as an engine would run it
(pytest)."""
import glob
import json
import os
import re
import signal
import subprocess
import tarfile
import time

import pytest

from manifests import CHART, helm_module

pytestmark = pytest.mark.rare("release")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NAME = "attnd-0.1.0-linux-x86_64"
MOST_MB = {f"{NAME}.tar.gz": 80, f"{NAME}.oci.tar": 150, f"{NAME}.cdx.json": 1, "attnd-0.1.0.tgz": 1,
           "attnd-0.1.0.tar.gz": 10}
MOST_MB_OF_WHEELS = {"attnd": 25, "attnd_server": 60}
ENVIRONMENT = dict(os.environ, PATH=f"{os.environ['PATH']}:{ROOT}/.deps/umoci/usr/bin")


def release(folder):
    subprocess.run(["deploy/release.sh", str(folder), NAME], cwd=ROOT, check=True, env=ENVIRONMENT, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return release(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def image(released, tmp_path_factory):
    """The image unpacked by umoci: its root file system, and the runtime's configuration."""
    folder = tmp_path_factory.mktemp("image")
    with tarfile.open(released / f"{NAME}.oci.tar") as archive:
        archive.extractall(folder / "layout")
    subprocess.run(["umoci", "unpack", "--rootless", "--image", f"{folder}/layout:0.1.0", str(folder / "run")], check=True,
                   env=ENVIRONMENT, capture_output=True)
    with open(folder / "run/config.json") as file:
        return folder / "run/rootfs", json.load(file)["process"]


def test_each_file_is_there_within_its_size_and_in_the_sums(released):
    limits = dict(MOST_MB)
    for name, most in MOST_MB_OF_WHEELS.items():
        wheel, = glob.glob(str(released / f"{name}-*.whl"))
        limits[os.path.basename(wheel)] = most
    for name, limit in limits.items():
        assert os.path.getsize(released / name) <= limit * 1e6, name
    sums = (released / "SHA256SUMS").read_text().splitlines()
    assert {line.split()[1] for line in sums} == set(limits)
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    subprocess.run(check, cwd=released, check=True, capture_output=True)
    path = released / f"{NAME}.cdx.json"
    path.write_bytes(path.read_bytes()[:-1])
    assert subprocess.run(check, cwd=released, capture_output=True).returncode == 1
    path.write_bytes(path.read_bytes() + b"\n")


def test_the_same_build_gives_the_same_bytes(released, tmp_path):
    assert (release(tmp_path) / "SHA256SUMS").read_text() == (released / "SHA256SUMS").read_text()


def test_the_sdist_has_the_sources_and_says_what_it_is(released):
    with tarfile.open(released / "attnd-0.1.0.tar.gz") as archive:
        names = archive.getnames()
        said = archive.extractfile("attnd-0.1.0/PKG-INFO").read().decode()
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert {f"attnd-0.1.0/{name}" for name in tracked} <= set(names) and "Version: 0.1.0\n" in said


def test_the_tag_names_the_release(tmp_path):
    """./dev's: once, of a tree without changes."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def tag():
        return subprocess.run([os.path.join(ROOT, "deploy/tag.sh"), "9.8.7"], cwd=tmp_path, capture_output=True, text=True,
                              env={**os.environ, "GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": "user.name",
                                   "GIT_CONFIG_VALUE_0": "a", "GIT_CONFIG_KEY_1": "user.email", "GIT_CONFIG_VALUE_1": "a@b"})

    (tmp_path / "a").write_text("1")
    subprocess.run(["git", "add", "a"], cwd=tmp_path, check=True)
    subprocess.run(["git", *identity, "commit", "-qm", "a"], cwd=tmp_path, check=True)
    (tmp_path / "a").write_text("2")
    assert tag().returncode == 1 and "not committed" in tag().stderr
    (tmp_path / "a").write_text("1")
    assert tag().returncode == 0, tag().stderr
    assert subprocess.check_output(["git", "tag", "-n1"], cwd=tmp_path, text=True).split() == ["v9.8.7", "attnd", "9.8.7"]
    assert tag().returncode == 0, "the same commit again"
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "b"], cwd=tmp_path, check=True)
    assert tag().returncode == 1 and "another commit" in tag().stderr


def test_the_tarball_is_the_bundle(released):
    with tarfile.open(released / f"{NAME}.tar.gz") as archive:
        names = archive.getnames()
    assert {f"{NAME}/{name}" for name in ("attnd", "attnctl", "sbom.cdx.json", "CHANGELOG.md", "LICENSE")} <= set(names)
    assert all(name == NAME or name.startswith(NAME + "/") for name in names)


def test_the_chart_is_the_folder(released):
    with helm_module().Chart.load_archive((released / "attnd-0.1.0.tgz").read_bytes()) as packed:
        rendered = packed.render({"monitoring": {"rules": {"enabled": True}}}, name="a", namespace="b")
    with helm_module().Chart.load(CHART) as chart:
        assert chart.render({"monitoring": {"rules": {"enabled": True}}}, name="a", namespace="b") == rendered
    assert "AttndDown" in rendered["attnd/templates/monitoring.yaml"]


def test_the_image_says_how_to_run_it(image):
    root, process = image
    index = json.loads((root.parent.parent / "layout/index.json").read_text())
    names = [one["annotations"]["io.containerd.image.name"] for one in index["manifests"]]
    assert names == ["docker.io/library/attnd:0.1.0"]
    configuration = json.loads((root.parent / "config.json").read_text())
    revision = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    assert configuration["annotations"]["org.opencontainers.image.revision"] == revision
    assert process["args"] == ["/opt/attnd/attnd"]
    assert (process["user"]["uid"], process["user"]["gid"]) == (65532, 65532)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in process["env"]
    packages = {one["name"] for one in json.loads((root / "opt/attnd/sbom.cdx.json").read_text())["components"]}
    assert {"libc6", "ca-certificates", "libssl3"} <= packages
    assert all((root / "opt/attnd/licenses" / name).stat().st_size > 100 for name in packages)
    assert not [path for path in root.rglob("*") if path.stat().st_mode & 0o6000], "nothing changes its user"


def inside(image, *command):
    """The command line that runs `command` within the image, as its user."""
    root, process = image
    user = f"--userspec={process['user']['uid']}:{process['user']['gid']}"
    if os.geteuid() == 0:
        return ["/usr/sbin/chroot", user, str(root), *command]
    return ["/usr/bin/unshare", "--map-root-user", "/usr/sbin/chroot", str(root), *command]  # of one user


def test_the_image_runs_checks_and_drains(image):
    root, process = image
    (root / "tmp").chmod(0o1777)
    environment = dict(entry.split("=", 1) for entry in process["env"])
    environment["LD_ORIGIN_PATH"] = "/opt/attnd"  # chroot mounts no /proc, in which the loader finds $ORIGIN
    daemon = subprocess.Popen(
        inside(image, *process["args"], "--listen", "unix:/tmp/attnd.sock", "--metrics_listen", "127.0.0.1:0",
               "--backend", "cpu", "--drain_delay", "0"), env=environment, stdin=subprocess.DEVNULL)
    try:
        for _ in range(300):
            if (root / "tmp/attnd.sock").exists():
                break
            assert daemon.poll() is None, "attnd ended early"
            time.sleep(0.1)
        done = subprocess.run(
            inside(image, "/opt/attnd/attnctl", "--address", "unix:/tmp/attnd.sock", "check", "--count", "20"),
            env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert done.returncode == 0 and re.search(r"\b0 wrong|all", done.stdout), done.stdout + done.stderr
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=60) == 0
