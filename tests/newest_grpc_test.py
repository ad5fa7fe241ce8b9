"""The sources compile with the headers of a gRPC that is years newer than Debian's, and of its abseil (pytest). Nothing is
linked: PyPI has the headers, in the source package of grpcio-observability, but no gRPC for C++."""
import os
import subprocess

import pytest

pytestmark = pytest.mark.rare("newest gRPC")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEADERS = os.path.join(ROOT, ".deps/grpc_headers")  # where `./dev test` puts them
GENERATED = os.path.join(ROOT, "bazel-bin/proto/attnd/v1/_virtual_imports")
# Those that use gRPC.
FOLDERS = ["client", "client/c", "client/call", "client/channels", "client/modules", "client/shards", "net", "server/app",
           "server/call", "server/modules", "server/rpc", "server/security", "server/wire"]
NOT_COMPILED = ("_test.cc", "_benchmark.cc", "_fuzzer.cc", "main.cc")


def compile_with_it(source, path):
    path.write_text(source)
    imports = ["mask_proto", "capture_proto", "attention_as_imported"]
    return subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", "-w", "-I.", "-Ibazel-bin", *[f"-I{GENERATED}/{name}" for name in imports],
         "-isystem", f"{HEADERS}/grpc_root/include", "-isystem", f"{HEADERS}/third_party/abseil-cpp", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_headers_are_newer_and_mistakes_are_found(tmp_path):
    version = "#include <grpcpp/version_info.h>\nstatic_assert(GRPC_CPP_VERSION_MINOR {} 51);\n"
    assert compile_with_it(version.format(">"), tmp_path / "newer.cc").returncode == 0
    assert compile_with_it(version.format("=="), tmp_path / "same.cc").returncode != 0
    gone = "#include <grpc/support/log.h>\nvoid F() { gpr_set_log_function(nullptr); }\n"
    assert "gpr_set_log_function" in compile_with_it(gone, tmp_path / "gone.cc").stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_compiles(folder, tmp_path):
    files = sorted(name for name in os.listdir(os.path.join(ROOT, folder))
                   if name.endswith(".cc") and not name.endswith(NOT_COMPILED))
    assert files
    done = compile_with_it("".join(f'#include "{folder}/{name}"\n' for name in files), tmp_path / "together.cc")
    assert done.returncode == 0, done.stderr[:4000]


def test_each_folder_that_uses_grpc_is_compiled():
    uses = subprocess.check_output(["git", "grep", "-lE", "include [<\"]grpc(pp)?/", "--", "client", "net", "server", "base",
                                    "kernels", "modules"], cwd=ROOT, text=True).split()
    assert {os.path.dirname(path) for path in uses} <= set(FOLDERS)
