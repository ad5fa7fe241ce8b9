"""attnctl's completion script, as bash itself uses it (pytest)."""
import os
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ATTNCTL = os.path.join(ROOT, "bazel-bin", "client", "attnctl")

# Bash is given the script in $SCRIPT and the words of a line in "$@"; it prints a word a line.
BASH = 'source "$SCRIPT"; COMP_WORDS=(attnctl "$@"); COMP_CWORD=$#; _attnctl; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture
def complete(tmp_path):
    """The words that bash offers for the last of a line's words."""
    script = tmp_path / "script"
    script.write_bytes(subprocess.run([ATTNCTL, "completion", "bash"], check=True, capture_output=True).stdout)
    environment = {**os.environ, "SCRIPT": str(script), "HOME": str(tmp_path)}

    def offered(*words):
        done = subprocess.run(["bash", "--norc", "-c", BASH, "bash", *words], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
        assert not done.stderr and done.returncode == 0, done
        return done.stdout.split()

    return offered


@pytest.mark.parametrize("words, expected", [
    (["be"], ["bench"]), (["bench", "--conc"], ["--concurrency-range"]), (["bench", "--dtype", "b"], ["bfloat16"]),
    (["-o", "js"], ["json"]), (["--output", "js"], ["json"]), (["bench", "--layout", "packed_t"], ["packed_thd"]),
    (["completion", "b"], ["bash"]), (["module", "pl"], ["plan"]), (["info", "--addr"], ["--address"])],
    ids=" ".join)
def test_offers(complete, words, expected):
    assert complete(*words) == expected


def test_offers_every_flag_of_a_command_and_none_of_another(complete):
    flags = complete("check", "--")
    assert {"--max-size", "--count", "--address", "--help"} <= set(flags)
    assert "--png" not in flags


def test_offers_files_where_a_flag_takes_one(complete, tmp_path):
    (tmp_path / "tensors.safetensors").write_bytes(b"")
    assert complete("run", "--in", "tens") == ["tensors.safetensors"]
    assert complete("estimate", "--shape", "tens") == []


@pytest.mark.parametrize("shell", ["tcsh", "zsh", "fish"])
def test_other_shells_are_refused(shell):
    done = subprocess.run([ATTNCTL, "completion", shell], capture_output=True, text=True)
    assert done.returncode == 2 and shell in done.stderr, done
