#!/usr/bin/env python3
"""Builds the wheel: one file for every CPython 3.9 or later on x86_64 Linux.

    python3 client/python/build_wheel.py LIBRARY ATTNCTL FOLDER [NATIVE]

LIBRARY is bazel-bin/client/c/libattnd_client.so, ATTNCTL bazel-bin/client/attnctl, NATIVE a folder that build_native.py
has already made from them.

Pure Python, the native library and attnctl with what they need (build_native.py), and the licences and an SBOM of what
is bundled. The platform tag is computed from the symbol versions of glibc and libstdc++ that the bundled libraries ask
for. The same sources and libraries give the same bytes.
"""
import base64
import hashlib
import os
import re
import stat
import subprocess
import sys
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "deploy"))

import bill_of_materials  # noqa: E402
import build_native  # noqa: E402

EPOCH = (1980, 1, 1, 0, 0, 0)

METADATA = """Metadata-Version: 2.1
Name: attnd
Version: {version}
Summary: Exact multi-head attention, forward and backward, computed by a remote daemon
License: {license}
Requires-Python: >=3.9
Requires-Dist: numpy>=1.22
Provides-Extra: torch
Requires-Dist: torch>=2.4; extra == "torch"
Provides-Extra: transformers
Requires-Dist: torch>=2.4; extra == "transformers"
Requires-Dist: transformers>=4.53; extra == "transformers"
Provides-Extra: jax
Requires-Dist: jax>=0.4.36; extra == "jax"
Keywords: attention,transformer,GPU,Volta,gRPC,PyTorch,JAX
Classifier: Development Status :: 4 - Beta
Classifier: Intended Audience :: Science/Research
Classifier: License :: OSI Approved :: Apache Software License
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Programming Language :: C++
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

{description}
"""


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
    """{name in the wheel's folder of metadata: bytes}: the product's licence, those of the Debian packages that are bundled
    or compiled in, and the SBOM (PEP 770)."""
    with open(os.path.join(ROOT, "LICENSE"), "rb") as file:
        texts = {"licenses/LICENSE": file.read()}
    files = {package: {} for package in WITHIN_ATTNCTL}
    paths = {**build_native.dependencies(library), **build_native.dependencies(program)}
    owners = bill_of_materials.owners(paths.values())
    for name, path in paths.items():
        shipped = build_native.bundled_name(name)
        with open(os.path.join(native, shipped), "rb") as file:
            files.setdefault(owners[path], {})[f"attnd/native/{shipped}"] = file.read()
    licences = {package: f"licenses/{package}.txt" for package in files}
    texts.update({name: bill_of_materials.terms(package).encode() for package, name in licences.items()})
    texts["sboms/attnd.cdx.json"] = bill_of_materials.sbom("library", licences, files).encode()
    return texts


def package_files():
    files = {}
    for package in ("attnd", "attnd/_modules", "attnd/sparse"):
        for name in sorted(os.listdir(os.path.join(HERE, package))):
            if name.endswith(".py") or name == "py.typed":
                with open(os.path.join(HERE, package, name), "rb") as file:
                    files[f"{package}/{name}"] = file.read()
    return files


def write_wheel(path, files, info):
    """Writes the zip with its RECORD; modes and times are fixed so that the bytes repeat."""
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as wheel:
        for name, data in sorted(files.items()):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
            add(wheel, name, data)
        add(wheel, f"{info}/RECORD", ("".join(record) + f"{info}/RECORD,,\n").encode())


def add(wheel, name, data):
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    # Installers keep the mode of what is marked as a regular file alone.
    entry.external_attr = (stat.S_IFREG | (0o755 if "/native/" in name else 0o644)) << 16
    wheel.writestr(entry, data)


def main(library, program, folder, native=None):
    if native is None:
        with tempfile.TemporaryDirectory() as native:
            build_native.main(library, native, program)
            return main(library, program, folder, native)
    version = bill_of_materials.release()
    info = f"attnd-{version}.dist-info"
    with open(os.path.join(ROOT, "docs/python.md")) as file:
        description = file.read()
    with open(os.path.join(ROOT, "LICENSE")) as file:
        licence = "Apache-2.0" if "Apache License" in file.read() else "see LICENSE"
    files = package_files()
    tag = "py3-none-manylinux_%d_%d_x86_64" % manylinux_policy(native)
    for name in os.listdir(native):
        with open(os.path.join(native, name), "rb") as file:
            files[f"attnd/native/{name}"] = file.read()
    files[f"{info}/METADATA"] = METADATA.format(version=version, license=licence, description=description).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: attnd\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nattnctl = attnd._attnctl:main\n"
    files.update({f"{info}/{name}": data for name, data in bill(library, program, native).items()})
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"attnd-{version}-{tag}.whl")
    write_wheel(path, files, info)
    print(f"{path}: {os.path.getsize(path) / 2**20:.1f} MiB")
    return path


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
