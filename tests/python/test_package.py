"""The wheel as a user gets it: installed elsewhere, imported, run; and the package's own promises."""
import hashlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
from conftest import ATTNCTL, LIBRARY, NATIVE, ROOT, SERVER, SOURCE

import attnd


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-B", os.path.join(SOURCE, "build_wheel.py"), "client", LIBRARY, ATTNCTL, str(folder),
                    NATIVE], check=True)
    name, = os.listdir(folder)
    return folder / name


@pytest.fixture(scope="module")
def server_wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server_wheel")
    subprocess.run([sys.executable, "-B", os.path.join(SOURCE, "build_wheel.py"), "server", SERVER, str(folder)], check=True)
    name, = os.listdir(folder)
    return folder / name


def install(folder, *wheels):
    """By pip, and an environment in which nothing of the source tree is seen."""
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check",
                    "--root-user-action=ignore", "--target", str(folder), *map(str, wheels)], check=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTND_")}
    return {**environment, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return install(tmp_path_factory.mktemp("site"), wheel)


def run(environment, *arguments):
    return subprocess.run([sys.executable, *arguments], env=environment, cwd="/", capture_output=True, text=True,
                          timeout=120)


def test_wheel_is_small_and_says_where_it_runs(wheel):
    assert os.path.getsize(wheel) < 25 * 2**20
    assert re.fullmatch(r"attnd-\d+\.\d+\.\d+-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        assert files.testzip() is None
        record = files.read(next(n for n in names if n.endswith("RECORD"))).decode().splitlines()
    assert sorted(line.partition(",")[0] for line in record) == sorted(names)
    assert "attnd/py.typed" in names


def tool(name, *arguments):
    """twine or auditwheel, which `./dev test` installs."""
    folder = os.path.join(ROOT, ".deps/wheel_checks")
    if not os.path.exists(folder):
        pytest.skip("no twine and auditwheel here")
    environment = {**os.environ, "PYTHONPATH": folder, "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-m", name, *arguments], env=environment, capture_output=True, text=True,
                          timeout=120)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.rare("package")
def test_twine_accepts_the_wheel(wheel, tmp_path):
    assert tool("twine", "check", "--strict", str(wheel))[0] == 0
    bare = tmp_path / wheel.name  # without its description
    with zipfile.ZipFile(wheel) as files, zipfile.ZipFile(bare, "w") as copy:
        for entry in files.infolist():
            data = files.read(entry)
            copy.writestr(entry, data.partition(b"\n\n")[0] + b"\n\n" if entry.filename.endswith("/METADATA") else data)
    status, text = tool("twine", "check", "--strict", str(bare))
    assert status == 1 and "long_description" in text


@pytest.mark.rare("package")
def test_auditwheel_finds_the_tags_right(wheel, server_wheel):
    for path in (wheel, server_wheel):
        tag = re.search(r"manylinux_2_\d+_x86_64", path.name).group()
        status, text = tool("auditwheel", "show", str(path))
        assert status == 0 and f'This constrains the platform tag to "{tag}"' in text, text


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as files:
        return files.read(next(name for name in files.namelist() if name.endswith("/METADATA"))).decode()


@pytest.mark.rare("package")
def test_daemons_wheel_is_small_and_of_the_clients_version(wheel, server_wheel):
    assert os.path.getsize(server_wheel) < 60e6
    assert re.fullmatch(r"attnd_server-\d+\.\d+\.\d+-py3-none-manylinux_2_\d+_x86_64\.whl", server_wheel.name)
    assert tool("twine", "check", "--strict", str(server_wheel))[0] == 0
    assert f"Requires-Dist: attnd=={attnd.__version__}\n" in metadata_of(server_wheel)
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", metadata_of(wheel), re.M))
    assert extras == {"torch", "transformers", "jax", "server", "prometheus", "otel", "ray"}
    assert f"Requires-Dist: attnd-server=={attnd.__version__}; extra == 'server'\n" in metadata_of(wheel)


@pytest.mark.rare("package")
def test_sdist_builds_where_bazel_does(wheel, tmp_path):
    """Bazel itself is a stand-in here, and what it has built is there."""
    subprocess.run([sys.executable, "-B", os.path.join(SOURCE, "build_sdist.py"), str(wheel), str(tmp_path)], check=True)
    name = f"attnd-{attnd.__version__}"
    assert tool("twine", "check", "--strict", str(tmp_path / f"{name}.tar.gz"))[0] == 0
    shutil.unpack_archive(tmp_path / f"{name}.tar.gz", tmp_path)
    (tmp_path / name / "bazel-bin").symlink_to(os.path.join(ROOT, "bazel-bin"))
    (tmp_path / "bazel").write_text("#!/bin/sh\n")
    (tmp_path / "bazel").chmod(0o755)

    def build(path):
        folders = os.pathsep.join([os.path.join(ROOT, ".deps/hatchling"), os.environ.get("PYTHONPATH", "")])
        return subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation",
                               "--disable-pip-version-check", "-w", str(tmp_path / "wheels"), str(tmp_path / name)],
                              env={**os.environ, "PYTHONPATH": folders, "PATH": path}, capture_output=True, text=True)

    done = build(f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(tmp_path / "wheels") == [wheel.name]
    (tmp_path / "nothing").mkdir()
    done = build(str(tmp_path / "nothing"))
    assert done.returncode != 0 and "building from source needs bazel" in done.stdout + done.stderr


def test_pages_of_the_source_are_named(tmp_path):
    """As the metadata hook has them for a source with a web address, and without one."""
    program = ("import os, sys; sys.path.insert(0, sys.argv[1]); import hatch_build; found = {}; "
               "hatch_build.Urls(None, {}).update(found); print(found['urls'])")
    folders = os.pathsep.join([SOURCE, os.path.join(ROOT, ".deps/hatchling")])
    for source, page in (("https://example.org/a/attnd", "https://example.org/a/attnd/blob/v9.8.7/CHANGELOG.md"), ("", "{}")):
        environment = {**os.environ, "PYTHONPATH": folders, "ATTND_SOURCE_URL": source, "ATTND_VERSION": "9.8.7"}
        assert page in run(environment, "-c", program, SOURCE).stdout


@pytest.mark.rare("package")
def test_from_nothing_to_a_served_call(wheel, server_wheel, tmp_path):
    """A user types this: pip install of both wheels, and two lines."""
    begin = time.monotonic()
    environment = install(tmp_path, wheel, server_wheel)
    program = """
import attnd, numpy as np
daemon = attnd.serve(backend="cpu")
client = attnd.connect(daemon.address)
q = np.ones((1, 1, 4, 8), np.float32)
assert (client.forward(q, q, q).out == 1).all()
"""
    done = run({**environment, "PATH": ""}, "-c", program)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 60
    done = run(environment, os.path.join(tmp_path, "bin/attnd"), "--version")
    assert done.stdout.startswith(f"attnd {attnd.__version__} ("), done


def test_each_library_in_the_wheel_is_in_its_sbom_with_its_terms(wheel):
    with zipfile.ZipFile(wheel) as files:
        read = {name: files.read(name) for name in files.namelist()}
    info = next(name for name in read if name.endswith("/RECORD"))[:-len("RECORD")]
    packages = json.loads(read[info + "sboms/attnd.cdx.json"])["components"]
    shipped = {file["name"]: file["hashes"][0]["content"] for package in packages for file in package.get("components", [])}
    assert shipped == {name: hashlib.sha256(data).hexdigest() for name, data in read.items()
                       if name.startswith("attnd/native/") and not re.search("/(libattnd_client|attnctl$)", name)}
    for package in packages:
        assert len(read[info + package["licenses"][0]["license"]["name"][len("see "):]]) > 100, package["name"]
    assert {"zlib1g", "libssl3", "nlohmann-json3-dev"} <= {package["name"] for package in packages}


def test_library_exports_its_interface_alone(installed):
    folder = os.path.join(installed["PYTHONPATH"], "attnd/native")
    library, = [name for name in os.listdir(folder) if name.startswith("libattnd_client")]
    listing = subprocess.run(["nm", "-D", "--defined-only", os.path.join(folder, library)], check=True, capture_output=True,
                             text=True).stdout
    with open(os.path.join(ROOT, "client/c/attnd_client.h")) as file:
        declared = set(re.findall(r"ATTND_API [^;(]*?(attnd_\w+)\(", file.read()))
    assert {line.split()[-1] for line in listing.splitlines()} == declared


def test_installed_wheel_computes_and_survives_a_fork(installed, daemon):
    program = """
import os, sys, numpy as np, attnd
assert "site" in attnd.__file__
q = np.ones((1, 1, 4, 8), np.float32)
client = attnd.connect(sys.argv[1])
assert (client.forward(q, q, q).out == 1).all()
if os.fork() == 0:
    assert (client.forward(q, q, q).out == 1).all()
    sys.exit(0)
assert os.wait()[1] == 0
"""
    done = run(installed, "-c", program, daemon.address)
    assert done.returncode == 0, done.stderr


def test_attnctl_is_the_programs_own(installed, daemon):
    """As pip's script for the entry point starts it; and by what the script calls."""
    script = os.path.join(installed["PYTHONPATH"], "bin/attnctl")
    assert run({**installed, "ATTND_ADDRESS": daemon.address}, script, "health").stdout.endswith(" SERVING\n")
    program = "import sys; from attnd._attnctl import main; sys.argv[0] = 'attnctl'; main()"
    for arguments, code, text in ((["--version"], 0, attnd.__version__), (["info"], 0, "cpu"), (["inf"], 2, "inf")):
        done = run({**installed, "ATTND_ADDRESS": daemon.address, "LD_LIBRARY_PATH": ""}, "-c", program, *arguments)
        assert done.returncode == code and text in done.stdout + done.stderr, (arguments, done)


def test_connect_without_an_address_reads_the_environment(daemon, tmp_path, monkeypatch):
    token, nothing = tmp_path / "token", tmp_path / "none"
    token.write_text("secret\n")
    nothing.write_text("\n")
    monkeypatch.delenv("ATTND_TOKEN_FILE", raising=False)
    monkeypatch.delenv("ATTND_ADDRESS", raising=False)
    with attnd.connect() as client:
        assert client.addresses == ["127.0.0.1:7070"]
    monkeypatch.setenv("ATTND_ADDRESS", f"{daemon.address},127.0.0.1:1")
    monkeypatch.setenv("ATTND_TOKEN_FILE", str(token))
    with attnd.connect() as client:
        assert client.addresses == [daemon.address, "127.0.0.1:1"]
        assert client._native_options.bearer_token == b"secret"
        assert client.info(0).version.startswith(attnd.__version__)
    with attnd.connect(daemon.address) as client:
        assert client._native_options.bearer_token is None, "a token goes to no address that the environment does not name"
    for path, error in ((nothing, attnd.InvalidArgument), (tmp_path / "away", attnd.NotFound)):
        monkeypatch.setenv("ATTND_TOKEN_FILE", str(path))
        with pytest.raises(error, match="ATTND_TOKEN_FILE"):
            attnd.connect()


def test_import_loads_nothing_and_connect_no_big_package(installed):
    program = """
import attnd, sys
loaded = lambda *names: [name for name in names if name in sys.modules]
print(loaded("numpy", "torch", "jax", "ctypes", "attnd.client"))
attnd.connect("127.0.0.1:1")
print(loaded("torch", "jax", "transformers", "ml_dtypes", "attnd.local"))
"""
    assert run(installed, "-c", program).stdout.split() == ["[]", "[]"]


def test_every_name_of_the_package_is_there():
    for name in attnd.__all__:
        assert getattr(attnd, name) is not None
    assert set(attnd.__all__) <= set(dir(attnd)) and attnd.client.Client is attnd.Client
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        attnd.conect


def test_no_file_of_attnd_masks_has_a_functions_name():
    """Its import would stand in the function's place."""
    from attnd import masks
    files = {name for _, name, _ in pkgutil.iter_modules(masks.__path__)}
    assert {"nodes", "recognise"} <= files and not files & set(masks.__all__)


def test_version_is_the_products():
    with open(os.path.join(ROOT, "base/version.h")) as file:
        assert f'kVersion = "{attnd.__version__}"' in file.read()


def test_structures_are_the_headers():
    """Field for field, in order, so that an edit of one side alone is seen."""
    import ctypes

    from attnd import _native
    with open(os.path.join(ROOT, "client/c/attnd_client.h")) as file:
        header = re.sub(r"/\*.*?\*/|//[^\n]*", "", file.read(), flags=re.S)
    names = {"attnd_client_options": _native.ClientOptions, "attnd_problem": _native.Problem,
             "attnd_forward_tensors": _native.ForwardTensors, "attnd_backward_tensors": _native.BackwardTensors,
             "attnd_progress": _native.Progress, "attnd_counters": _native.Counters,
             "attnd_module_forward_tensors": _native.ModuleForward,
             "attnd_module_backward_tensors": _native.ModuleBackward, "attnd_module_tensor": _native.ModuleTensor}
    for name, structure in names.items():
        body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", header, re.S).group(1)
        fields = [re.findall(r"\w+", part.replace("[4]", ""))[-1] for line in body.split(";") if line.strip()
                  for part in line.split(",")]
        assert fields == [field[0] for field in structure._fields_], name
        assert ctypes.sizeof(structure) % 8 == 0


def test_types_are_strictly_checked(tmp_path):
    """With PyTorch's and NumPy's; to read those of transformers and JAX takes two more minutes."""
    pytest.importorskip("mypy")
    for package in ("torch", "transformers", "jax"):
        pytest.importorskip(package)
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-transformers,transformers.*,jax,jax.*]\nfollow_imports = skip\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--config-file", str(config), "--cache-dir",
                           os.path.join(ROOT, ".build/mypy"), os.path.join(SOURCE, "attnd")],
                          capture_output=True, text=True, cwd=SOURCE)
    assert done.returncode == 0, done.stdout


def test_results_of_both_sides_are_numpy_arrays(client):
    q = np.ones((1, 1, 4, 8), np.float16)
    assert type(client.forward(q, q, q).out) is np.ndarray


def readme_blocks(kind):
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        return re.findall(rf"^```{kind}\n(.*?)^```$", file.read(), re.M | re.S)


@pytest.mark.rare("package")
def test_readme_installs_and_trains_in_a_new_environment(wheel, tmp_path, daemon):
    """The block that installs, in a folder with the wheel and without an index: PyTorch and NumPy are those of this run."""
    pytest.importorskip("torch")
    block, = [block for block in readme_blocks("sh") if "pip install" in block]
    assert block.count(" torch\n") == 1 and "python3 -m venv" in block
    block = re.sub(r"(pip install \S+) torch", r"\1 --no-deps --no-index -q --disable-pip-version-check", block)
    shutil.copy(wheel, tmp_path)
    program, = readme_blocks("python")
    (tmp_path / "train.py").write_text(program.replace("127.0.0.1:7070", daemon.address))
    packages = os.pathsep.join(path for path in sys.path if path.endswith("frameworks"))
    script = f"set -e\n{block}\nPYTHONPATH={packages} OMP_NUM_THREADS=1 python train.py"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ATTND_", "PYTHON"))}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env={**environment, "ATTND_ADDRESS": daemon.address},
                          capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step 100: loss 0\.0", done.stdout) and (tmp_path / "attnd-env/bin/attnctl").exists()
