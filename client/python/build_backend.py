"""The build backend (PEP 517) by which pip installs attnd from its sources: Bazel compiles, build_wheel.py packs."""
import os
import shutil
import subprocess

import build_wheel as wheels

TARGETS = ["//client/c:libattnd_client.so", "//client:attnctl"]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    missing = [program for program in ("bazel", "patchelf", "objdump", "strip") if shutil.which(program) is None]
    if missing:
        raise SystemExit(f"attnd: building from source needs {', '.join(missing)}: run ./dev build once, on Debian 12, "
                         "which installs them; or install the wheel, which needs none")
    subprocess.run(["bazel", "build", *TARGETS], cwd=wheels.ROOT, check=True)
    built = (os.path.join(wheels.ROOT, "bazel-bin", path) for path in ("client/c/libattnd_client.so", "client/attnctl"))
    return os.path.basename(wheels.build(wheels.client_wheel(*built), wheel_directory))
