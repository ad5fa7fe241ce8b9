"""C++ sources compile alone, and so include what they need, though builds compile a folder's sources together (pytest).

Checks those that were changed last: all take three quarters of an hour of a processor (`bazel build --define rooms=apart
//...`). Generated headers come from the last build.
"""
import concurrent.futures
import os
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
IMPORTS = "bazel-bin/proto/attnd/v1/_virtual_imports"
OPTIONS = ["-std=c++20", "-I.", "-Ibazel-bin", f"-I{IMPORTS}/mask_proto", f"-I{IMPORTS}/capture_proto",
           f"-I{IMPORTS}/attention_as_imported", "-Itests/emulator/host",
           "-I.deps/nv/nvidia/cuda_runtime/include", "-I.deps/nv/nvidia/cuda_nvrtc/include"]
CHANGED_LAST = 60

pytestmark = pytest.mark.rare("each source alone")


def errors_of(source, options=()):
    """The compiler's errors, "" where there are none; no code is made."""
    done = subprocess.run(["g++", *OPTIONS, *options, "-fsyntax-only", "-w", "-x", "c++", source], cwd=ROOT,
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stderr if done.returncode else ""


def git(*arguments):
    """The lines of its output."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def sources():
    """Pairs of a folder and its sources among those that were changed last."""
    changed = git("log", "--format=", "--name-only", "--no-renames", "--", "*.cc", ":!third_party")
    present = set(git("ls-files", "*.cc"))
    folders = {}
    for name in [name for name in dict.fromkeys(changed) if name in present][:CHANGED_LAST]:
        folders.setdefault(os.path.dirname(name), []).append(name)
    return sorted(folders.items())


@pytest.mark.parametrize("folder, files", sources(), ids=lambda value: value if isinstance(value, str) else "")
def test_each_source_compiles_alone(folder, files):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = [errors for errors in pool.map(errors_of, files) if errors]
    assert not failed, "\n".join(failed)


def test_a_source_that_leans_on_its_neighbour_is_found(tmp_path):
    source = tmp_path / "leaning.cc"
    source.write_text("std::string Name() { return {}; }\n")
    assert "std" in errors_of(str(source))
    source.write_text("#include <string>\nstd::string Name() { return {}; }\n")
    assert not errors_of(str(source))
