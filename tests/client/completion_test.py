"""attnctl's completion scripts, as the shells themselves use them (pytest). A shell that is not installed is left out."""
import os
import shutil
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ATTNCTL = os.path.join(ROOT, "bazel-bin", "client", "attnctl")

# What each shell is told to do with its script in $SCRIPT and the words of a line in "$@"; it prints a word a line.
BASH = 'source "$SCRIPT"; COMP_WORDS=(attnctl "$@"); COMP_CWORD=$#; _attnctl; printf "%s\\n" "${COMPREPLY[@]}"'
# zsh completes in a terminal alone, so what offers words prints them here; zsh itself leaves out what does not begin
# as the last word does.
ZSH = """compdef() { true }
_files() { print FILES }
_describe() { print -l -- ${${(P)2}%%:*} }
compadd() { print -l -- $@ }
source $SCRIPT
words=(attnctl "$@") CURRENT=$#words
_attnctl | while read -r word; do [[ $word == FILES || $word == "$words[-1]"* ]] && print -r -- $word; done; true"""
FISH = 'source $SCRIPT; complete -C "attnctl $argv" | string replace -r "\\t.*" ""; true'
SHELLS = {"bash": ["bash", "--norc", "-c", BASH, "bash"], "zsh": ["zsh", "-f", "-c", ZSH, "zsh"],
          "fish": ["fish", "--no-config", "-c", FISH, "--"]}


@pytest.fixture(params=SHELLS)
def complete(request, tmp_path):
    """The words that the shell offers for the last of a line's words."""
    shell = request.param
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    script = tmp_path / "script"
    script.write_bytes(subprocess.run([ATTNCTL, "completion", shell], check=True, capture_output=True).stdout)
    environment = {**os.environ, "SCRIPT": str(script), "HOME": str(tmp_path)}

    def offered(*words):
        done = subprocess.run([*SHELLS[shell], *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=60)
        assert not done.stderr and done.returncode == 0, done
        return done.stdout.split()

    return offered


@pytest.mark.parametrize("words, expected", [
    (["be"], ["bench"]), (["bench", "--conc"], ["--concurrency-range"]), (["bench", "--dtype", "b"], ["bfloat16"]),
    (["-o", "js"], ["json"]), (["--output", "js"], ["json"]), (["bench", "--layout", "packed_t"], ["packed_thd"]),
    (["completion", "z"], ["zsh"]), (["module", "pl"], ["plan"]), (["info", "--addr"], ["--address"])],
    ids=" ".join)
def test_each_shell_offers(complete, words, expected):
    assert complete(*words) == expected


def test_offers_every_flag_of_a_command_and_none_of_another(complete):
    flags = complete("check", "--")
    assert {"--max-size", "--count", "--address", "--help"} <= set(flags)
    assert "--png" not in flags


def test_offers_files_where_a_flag_takes_one(complete, tmp_path):
    (tmp_path / "tensors.safetensors").write_bytes(b"")
    assert complete("run", "--in", "tens") in (["tensors.safetensors"], ["FILES"])
    assert complete("estimate", "--shape", "tens") == []


def test_other_shells_are_refused():
    done = subprocess.run([ATTNCTL, "completion", "tcsh"], capture_output=True, text=True)
    assert done.returncode == 2 and "tcsh" in done.stderr, done
