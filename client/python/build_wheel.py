#!/usr/bin/env python3
"""Builds the wheel: one file for every CPython 3.9 or later on x86_64 Linux.

    python3 client/python/build_wheel.py LIBRARY ATTNCTL FOLDER [NATIVE]

LIBRARY is bazel-bin/client/c/libattnd_client.so, ATTNCTL bazel-bin/client/attnctl, NATIVE a folder that build_native.py
has already made from them.

Pure Python, the native library and attnctl with what they need (build_native.py), and the licences and an SBOM of what
is bundled, are laid out for hatchling, which writes the wheel as pyproject.toml says. The platform tag is computed from
the symbol versions of glibc and libstdc++ that the bundled libraries ask for. The source's address is that of git's
origin, if it is a web address. The same sources and libraries give the same bytes.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "deploy"))

import bill_of_materials  # noqa: E402
import build_native  # noqa: E402

HATCHLING = os.path.join(ROOT, ".deps/hatchling")  # where `./dev wheel` puts it


# The manylinux policy, the release of glibc, that first grants a release of libstdc++ (pypa/auditwheel,
# manylinux-policy.json).
LIBSTDCXX_POLICY = {(3, 4, 29): (2, 34), (3, 4, 30): (2, 35), (3, 4, 31): (2, 38), (3, 4, 32): (2, 39)}


# Compiled into attnctl: archives, and headers alone.
WITHIN_ATTNCTL = ("libgrpc-dev", "libgrpc++-dev", "libprotobuf-dev", "libabsl-dev", "libcli11-dev", "nlohmann-json3-dev")


def manylinux_policy(folder):
    """The first manylinux policy, as (2, 35), that grants the symbol versions which the folder's libraries ask for."""
    newest = (2, 17)
    for name in os.listdir(folder):
        listing = subprocess.run(["objdump", "-T", os.path.join(folder, name)], check=True, capture_output=True,
                                 text=True).stdout
        glibc = [(int(major), int(minor)) for major, minor in re.findall(r"\bGLIBC_(\d+)\.(\d+)", listing)]
        libstdcxx = [tuple(map(int, found)) for found in re.findall(r"\bGLIBCXX_(\d+)\.(\d+)\.(\d+)", listing)]
        granted = [LIBSTDCXX_POLICY[version] for version in libstdcxx if version >= (3, 4, 29)]
        newest = max([newest, *glibc, *granted])
    return newest


def bill(library, program, native):
    """{name: text}: the licences of the Debian packages that are bundled or compiled in, and the SBOM (PEP 770)."""
    files = {package: {} for package in WITHIN_ATTNCTL}
    paths = {**build_native.dependencies(library), **build_native.dependencies(program)}
    owners = bill_of_materials.owners(paths.values())
    for name, path in paths.items():
        shipped = build_native.bundled_name(name)
        with open(os.path.join(native, shipped), "rb") as file:
            files.setdefault(owners[path], {})[f"attnd/native/{shipped}"] = file.read()
    licences = {package: f"licenses/{package}.txt" for package in files}
    texts = {f"{package}.txt": bill_of_materials.terms(package) for package in files}
    texts["attnd.cdx.json"] = bill_of_materials.sbom("library", licences, files)
    return texts


def source_url():
    done = subprocess.run(["git", "-C", ROOT, "remote", "get-url", "origin"], capture_output=True, text=True)
    address = re.fullmatch(r"https?://(?:[^@/]*@)?(\S+?)(?:\.git)?", done.stdout.strip())
    return f"https://{address[1]}" if address else ""


def lay_out(folder, texts, native):
    """Puts what pyproject.toml names into one folder."""
    for name in ("pyproject.toml", "hatch_build.py"):
        shutil.copy(os.path.join(HERE, name), folder)
    shutil.copy(os.path.join(ROOT, "LICENSE"), folder)
    shutil.copy(os.path.join(ROOT, "docs/start.md"), os.path.join(folder, "README.md"))
    shutil.copytree(os.path.join(HERE, "attnd"), os.path.join(folder, "attnd"))
    shutil.copytree(native, os.path.join(folder, "attnd/native"))
    for name in os.listdir(os.path.join(folder, "attnd/native")):
        os.chmod(os.path.join(folder, "attnd/native", name), 0o755)
    for name, text in texts.items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)


def main(library, program, folder, native=None):
    if native is None:
        with tempfile.TemporaryDirectory() as native:
            build_native.main(library, native, program)
            return main(library, program, folder, native)
    environment = {**os.environ, "ATTND_VERSION": bill_of_materials.release(), "ATTND_SOURCE_URL": source_url(),
                   "ATTND_WHEEL_TAG": "py3-none-manylinux_%d_%d_x86_64" % manylinux_policy(native),
                   "PYTHONPATH": os.pathsep.join(filter(None, [HATCHLING, os.environ.get("PYTHONPATH")]))}
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as source:
        lay_out(source, bill(library, program, native), native)
        subprocess.run([sys.executable, "-B", "-m", "hatchling", "build", "-t", "wheel", "-d", os.path.abspath(folder)],
                       cwd=source, env=environment, check=True)
    path = os.path.join(folder, f"attnd-{environment['ATTND_VERSION']}-{environment['ATTND_WHEEL_TAG']}.whl")
    print(f"{path}: {os.path.getsize(path) / 2**20:.1f} MiB")
    return path


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
