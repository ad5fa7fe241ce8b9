"""Linters of others over what is handed out: hadolint, shellcheck and yamllint find nothing, and what is planted (pytest).

Helm's own lint is in chart_test.py.
"""
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.rare("linters")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LINTERS = os.path.join(ROOT, ".deps/lint")  # wheels, which `./dev test` installs
TEMPLATES = ":!deploy/helm/attnd/templates"  # YAML once they are rendered; the conda recipe, too
# Debian's packages have one version in a release. What shellcheck calls a note is taste.
COMMANDS = {"hadolint": [f"{LINTERS}/bin/hadolint", "--no-color", "--ignore", "DL3008"],
            "shellcheck": [f"{LINTERS}/bin/shellcheck", "--severity=warning", "--color=never"],
            "yamllint": [sys.executable, "-m", "yamllint", "-f", "parsable", "-d",
                         "{extends: relaxed, rules: {line-length: disable}}"]}
FILES = {"hadolint": ["*Containerfile"], "shellcheck": ["*.sh", "dev", ".ci/run", "*.sbatch"],
         "yamllint": ["*.yml", "*.yaml", TEMPLATES, ":!deploy/conda"]}
PLANTED = {"hadolint": "FROM debian\nRUN cd /tmp\n", "shellcheck": "#!/bin/bash\nfor f in $(ls *.sh); do rm $g; done\n",
           "yamllint": "a: 1\na: 2\n"}


def lint(name, files):
    return subprocess.run([*COMMANDS[name], *files], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          env={**os.environ, "PYTHONPATH": LINTERS}, timeout=300)


@pytest.mark.parametrize("name", COMMANDS)
def test_linter_finds_nothing_but_what_is_planted(name, tmp_path):
    files = subprocess.check_output(["git", "ls-files", *FILES[name]], cwd=ROOT, text=True).split()
    assert files
    done = lint(name, files)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
    (tmp_path / "planted").write_text(PLANTED[name])
    assert lint(name, [str(tmp_path / "planted")]).returncode == 1
