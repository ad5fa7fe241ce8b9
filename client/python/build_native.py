#!/usr/bin/env python3
"""Makes attnd/native/: libattnd_client and the libraries it needs, in a form that shares nothing with a process.

    python3 client/python/build_native.py LIBRARY FOLDER [ATTNCTL]      (needs patchelf)

Each library that is no part of every Linux is copied beside it under a name of ours, "-attnd0" in it, and looks for
the others in its own folder, so that no other copy in a process is taken for it or takes it; ATTNCTL, which keeps its
name, looks there too. Symbols that the dynamic linker would unite over all libraries of a process (STB_GNU_UNIQUE) become
weak, so that a second copy, which a forked child loads under another name, has globals of its own. The library itself
exports attnd_* alone: members of std::string that the linker exports because other libraries ask for them, too, come from
libstdc++ instead.
"""
import os
import re
import shutil
import struct
import subprocess
import sys

MARK = "-attnd0"
EVERYWHERE = re.compile(r"(linux-vdso|ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s)\.so")
SHT_DYNSYM, STB_GNU_UNIQUE, STB_WEAK = 11, 10, 2


def bundled_name(name):
    """libssl.so.3 → libssl-attnd0.so.3; libgrpc++.so.1.51 → libgrpc++-attnd0.so.1.51."""
    stem, _, rest = os.path.basename(name).partition(".so")
    return f"{stem}{MARK}.so{rest}"


def dependencies(library):
    """{soname: path} of everything that the loader would load and that is not everywhere."""
    found = {}
    listing = subprocess.run(["ldd", library], check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        name, _, path = line.strip().partition(" => ")
        if "not found" in line:
            raise SystemExit(f"{library} needs {name}, which is not installed")
        if path and not EVERYWHERE.match(name):
            found[name] = path.rsplit(" (", 1)[0]
    return found


def needed(library):
    listing = subprocess.run(["patchelf", "--print-needed", library], check=True, capture_output=True, text=True)
    return listing.stdout.split()


def hide_symbols(library, ours):
    """Edits the 64-bit ELF file in place: unique symbols become weak, and functions that libstdc++ has too undefined in
    the library of which all but attnd_* is hidden (`ours`). Returns how many symbols changed."""
    with open(library, "r+b") as file:
        data = bytearray(file.read())
        sections_at, = struct.unpack_from("<Q", data, 0x28)
        entry_size, count = struct.unpack_from("<HH", data, 0x3A)
        changed = 0
        for n in range(count):
            header = sections_at + n * entry_size
            kind, = struct.unpack_from("<I", data, header + 4)
            begin, size, link = struct.unpack_from("<QQI", data, header + 0x18)
            names_at, = struct.unpack_from("<Q", data, sections_at + link * entry_size + 0x18)
            for at in range(begin, begin + size, 24) if kind == SHT_DYNSYM else ():
                name, bits, _, section = struct.unpack_from("<IBBH", data, at)
                if bits >> 4 == STB_GNU_UNIQUE:
                    data[at + 4] = STB_WEAK << 4 | bits & 15
                    changed += 1
                elif ours and section != 0 and data.startswith(b"_ZNSt7__cxx1112basic_string", names_at + name):
                    struct.pack_into("<HQQ", data, at + 6, 0, 0, 0)
                    changed += 1
        file.seek(0)
        file.write(data)
    return changed


def main(library, folder, *programs):
    """All of them or none: what is half made is no folder of that name. library: None where there are programs alone."""
    unfinished = folder.rstrip("/") + ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(unfinished)
    made = [path for path in (library, *programs) if path]
    sources = {os.path.basename(path): path for path in made}
    for path in made:
        sources.update(dependencies(path))
    for name, path in sources.items():
        is_program = path in programs
        target = os.path.join(unfinished, name if is_program else bundled_name(name))
        shutil.copyfile(os.path.realpath(path), target)
        os.chmod(target, 0o755)
        subprocess.run(["strip", "--strip-unneeded", target], check=True)
        change = [argument for other in needed(target) if other in sources
                  for argument in ("--replace-needed", other, bundled_name(other))]
        # One kind of change a run: patchelf 0.14 writes broken strings when several grow the table at once.
        soname = [] if is_program else ["--set-soname", bundled_name(name)]
        for options in (soname, ["--set-rpath", "$ORIGIN"], change):
            if options:
                subprocess.run(["patchelf", *options, target], check=True)
        if not is_program:
            hide_symbols(target, ours=path == library)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(unfinished, folder)
    size = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
    print(f"{len(sources)} files, {size / 2**20:.1f} MiB in {folder}")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
