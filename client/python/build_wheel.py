#!/usr/bin/env python3
"""Builds a wheel: one file for every CPython 3.9 or later on x86_64 Linux.

    python3 client/python/build_wheel.py client LIBRARY ATTNCTL FOLDER [NATIVE]
    python3 client/python/build_wheel.py server ATTND FOLDER

LIBRARY is bazel-bin/client/c/libattnd_client.so, ATTNCTL bazel-bin/client/attnctl, ATTND bazel-bin/server/attnd, NATIVE a
folder that build_native.py has already made from the first two.

Pure Python, the binaries with what they need (build_native.py), and the licences and an SBOM of what is bundled, are laid
out for hatchling, which writes the wheel as pyproject.toml says. The platform tag is computed from the symbol versions of
glibc and libstdc++ that the binaries ask for. The source's address is that of git's origin, if it is a web address. The
same sources and binaries give the same bytes.
"""
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Optional, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "deploy"))

import bill_of_materials  # noqa: E402
import build_native  # noqa: E402

HATCHLING = os.path.join(ROOT, ".deps/hatchling")  # where `./dev wheel` puts it


# The manylinux policy, the release of glibc, that first grants a release of libstdc++ (pypa/auditwheel,
# manylinux-policy.json).
LIBSTDCXX_POLICY = {(3, 4, 29): (2, 34), (3, 4, 30): (2, 35), (3, 4, 31): (2, 38), (3, 4, 32): (2, 39)}


# Compiled into the programs: archives, and headers alone.
WITHIN_PROGRAMS = ("libgrpc-dev", "libgrpc++-dev", "libprotobuf-dev", "libabsl-dev", "libcli11-dev", "nlohmann-json3-dev")


@dataclasses.dataclass
class Wheel:
    """name: of the wheel and of its package. project: where pyproject.toml and the package are. readme: the page that an
    index shows."""
    name: str
    project: str
    readme: str
    library: Optional[str]
    programs: Tuple[str, ...]

    @property
    def binaries(self):
        return [path for path in (self.library, *self.programs) if path]


def client_wheel(library, attnctl):
    return Wheel("attnd", HERE, os.path.join(ROOT, "docs/start.md"), library, (attnctl,))


def server_wheel(attnd):
    project = os.path.join(HERE, "server")
    return Wheel("attnd_server", project, os.path.join(project, "README.md"), None, (attnd,))


def manylinux_policy(folder):
    """The first manylinux policy, as (2, 35), that grants the symbol versions which the folder's binaries ask for."""
    newest = (2, 17)
    for name in os.listdir(folder):
        listing = subprocess.run(["objdump", "-T", os.path.join(folder, name)], check=True, capture_output=True,
                                 text=True).stdout
        glibc = [(int(major), int(minor)) for major, minor in re.findall(r"\bGLIBC_(\d+)\.(\d+)", listing)]
        libstdcxx = [tuple(map(int, found)) for found in re.findall(r"\bGLIBCXX_(\d+)\.(\d+)\.(\d+)", listing)]
        granted = [LIBSTDCXX_POLICY[version] for version in libstdcxx if version >= (3, 4, 29)]
        newest = max([newest, *glibc, *granted])
    return newest


def bill(wheel, native):
    """{name: text}: the licences of the Debian packages that are bundled or compiled in, and the SBOM (PEP 770)."""
    files = {package: {} for package in WITHIN_PROGRAMS}
    paths = {name: path for binary in wheel.binaries for name, path in build_native.dependencies(binary).items()}
    owners = bill_of_materials.owners(paths.values())
    for name, path in paths.items():
        shipped = build_native.bundled_name(name)
        with open(os.path.join(native, shipped), "rb") as file:
            files.setdefault(owners[path], {})[f"{wheel.name}/native/{shipped}"] = file.read()
    licences = {package: f"licenses/{package}.txt" for package in files}
    texts = {f"{package}.txt": bill_of_materials.terms(package) for package in files}
    texts["attnd.cdx.json"] = bill_of_materials.sbom("library", licences, files)
    return texts


def source_url():
    done = subprocess.run(["git", "-C", ROOT, "remote", "get-url", "origin"], capture_output=True, text=True)
    address = re.fullmatch(r"https?://(?:[^@/]*@)?(\S+?)(?:\.git)?", done.stdout.strip())
    return f"https://{address[1]}" if address else ""


def lay_out(wheel, folder, native):
    """Puts what pyproject.toml names into one folder."""
    texts = bill(wheel, native)
    with open(os.path.join(wheel.project, "pyproject.toml")) as file:
        texts["pyproject.toml"] = file.read().replace("@version@", bill_of_materials.release())
    for name, text in texts.items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
    shutil.copy(os.path.join(HERE, "hatch_build.py"), folder)
    shutil.copy(os.path.join(ROOT, "LICENSE"), folder)
    shutil.copy(wheel.readme, os.path.join(folder, "README.md"))
    package = os.path.join(folder, wheel.name)
    shutil.copytree(os.path.join(wheel.project, wheel.name), package)
    shutil.copytree(native, os.path.join(package, "native"))
    for name in os.listdir(os.path.join(package, "native")):
        os.chmod(os.path.join(package, "native", name), 0o755)


def build(wheel, folder, native=None):
    """The path of the wheel in the folder."""
    if native is None:
        with tempfile.TemporaryDirectory() as native:
            build_native.main(wheel.library, native, *wheel.programs)
            return build(wheel, folder, native)
    environment = {**os.environ, "ATTND_VERSION": bill_of_materials.release(), "ATTND_SOURCE_URL": source_url(),
                   "ATTND_WHEEL_TAG": "py3-none-manylinux_%d_%d_x86_64" % manylinux_policy(native),
                   "PYTHONPATH": os.pathsep.join(filter(None, [HATCHLING, os.environ.get("PYTHONPATH")]))}
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as source:
        lay_out(wheel, source, native)
        subprocess.run([sys.executable, "-B", "-m", "hatchling", "build", "-t", "wheel", "-d", os.path.abspath(folder)],
                       cwd=source, env=environment, check=True)
    path = os.path.join(folder, f"{wheel.name}-{environment['ATTND_VERSION']}-{environment['ATTND_WHEEL_TAG']}.whl")
    print(f"{path}: {os.path.getsize(path) / 2**20:.1f} MiB")
    return path


def main(kind, *arguments):
    if kind == "client" and len(arguments) in (3, 4):
        library, attnctl, folder, *native = arguments
        return build(client_wheel(library, attnctl), folder, *native)
    if kind == "server" and len(arguments) == 2:
        attnd, folder = arguments
        return build(server_wheel(attnd), folder)
    raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
