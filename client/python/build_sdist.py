#!/usr/bin/env python3
"""Packs the sources of HEAD as Python's source distribution, FOLDER/attnd-VERSION.tar.gz.

    python3 client/python/build_sdist.py WHEEL FOLDER

WHEEL is the client's, whose metadata it has. build_backend.py builds it. The same commit and wheel give the same bytes.
"""
import gzip
import io
import os
import subprocess
import sys
import tarfile
import zipfile

import build_wheel


def metadata(wheel):
    with zipfile.ZipFile(wheel) as files:
        return files.read(next(name for name in files.namelist() if name.endswith(".dist-info/METADATA")))


def main(wheel, folder):
    name = f"attnd-{build_wheel.bill_of_materials.release()}"
    git = ["git", "-C", build_wheel.ROOT]
    sources = subprocess.run([*git, "archive", f"--prefix={name}/", "HEAD"], check=True, capture_output=True).stdout
    entry = tarfile.TarInfo(f"{name}/PKG-INFO")
    text = metadata(wheel)
    entry.size, entry.mtime = len(text), int(subprocess.check_output([*git, "log", "-1", "--format=%ct"]))
    packed = io.BytesIO(sources)
    with tarfile.open(fileobj=packed, mode="a", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(entry, io.BytesIO(text))
    path = os.path.join(folder, f"{name}.tar.gz")
    with open(path, "wb") as file, gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as zipped:
        zipped.write(packed.getvalue())
    print(f"{path}: {os.path.getsize(path) / 2**20:.1f} MiB")
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
