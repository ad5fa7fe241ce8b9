"""What README.md and docs/python.md tell a newcomer to type, typed here: commands and Python in the documents' order, on
the CPU engine and on an emulated GPU. Packages that are not installed here are left out."""
import importlib.util
import os
import re
import shlex
import subprocess
import warnings

import numpy as np
import pytest

import attnd
from conftest import ROOT

DOCUMENTS = ["README.md", "docs/python.md"]
ADDRESS = "127.0.0.1:7070"  # of the documents
HERE_NOT = {"pip": "tests/python/test_package.py installs the wheel", "podman": "deploy/release_test.py runs the image"}
# The emulator computes 1e8 FLOP a second: the same commands, of less work.
LESS = {"attnctl check": ["--count", "10"],
        "attnctl bench": ["--shape", "1,2,64,64", "--duration", "0.5", "--warmup", "0"]}


def blocks(document):
    """Indented lines of a document, without comments at their ends, by runs without a blank line."""
    with open(os.path.join(ROOT, document)) as file:
        text = re.sub(r"^```.*?^```", "", file.read(), flags=re.M | re.S)
    for run in re.split(r"\n\s*\n", text):
        lines = run.split("\n")
        if all(line.startswith("    ") for line in lines if line):
            yield [line[4:] for line in lines if line]


def kind_of(block):
    words = {line.split()[0] for line in block}
    if all(re.match(r"\./dev|bazel-bin/|python3|pip|podman|attnctl", word) for word in words):
        return "commands"
    if re.search("[·→²ᵀ]", block[0]):
        return "formula"
    compile("\n".join(block), "block", "exec")
    return "python"


def of_kind(document, kind):
    return [block for block in blocks(document) if kind_of(block) == kind]


def test_every_block_is_of_a_kind_and_there_are_some():
    kinds = [kind_of(block) for document in DOCUMENTS for block in blocks(document)]
    assert kinds.count("commands") >= 3 and kinds.count("python") >= 7, kinds
    with pytest.raises(SyntaxError):
        kind_of(["client = attnd.connect("])


@pytest.fixture(params=["cpu", "gpu"])
def engine(request):
    return request.getfixturevalue({"cpu": "daemon", "gpu": "gpu_daemon"}[request.param])


def run(words, engine):
    environment = {**os.environ, "ATTND_ADDRESS": engine.address}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment,
                          timeout=600)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_succeed(document, engine, request):
    on_gpu = engine.address == request.getfixturevalue("gpu_daemon").address
    for line in [line for block in of_kind(document, "commands") for line in block]:
        words = shlex.split(line, comments=True)
        if words[0] in HERE_NOT:
            continue
        if words[0] == "attnctl":
            words[0] = "bazel-bin/client/attnctl"
        if words[0] == "./dev":  # the long ones: there is such a command
            assert words[1] in run(["./dev", "help", words[1]], engine)
        elif words[0] == "bazel-bin/server/attnd":  # the fixtures have started it
            run([*words, "--check_config", "--backend", "cpu"], engine)
        else:
            assert words[0] == "bazel-bin/client/attnctl", words
            less = LESS[f"attnctl {words[1]}"] if on_gpu else ["--duration", "0.5"] if words[1] == "bench" else []
            out = run([*words, *less], engine)
            assert re.search(r"^float32 bhld", out) or words[1] != "bench"
            assert not re.search(r"[1-9]\d* *$", out.splitlines()[-1]) or words[1] != "bench", out  # errors


def missing(block):
    """The first package that a block needs and is not here."""
    needs = re.findall(r"attnd\.(torch|transformers|jax)\b", "\n".join(block))
    needs = [*needs, *(["torch"] if "transformers" in needs else [])]
    return next((name for name in needs if importlib.util.find_spec(name) is None), None)


def names_for(block, folder):
    """What a block takes for granted."""
    rng = np.random.default_rng(1)
    given = {name: rng.standard_normal((1, 2, 8, 16)).astype(np.float32) for name in ("q", "k", "v", "dout")}
    if any("attnd.jax" in line for line in block):
        import jax.numpy
        given = {name: jax.numpy.asarray(array) for name, array in given.items()}
    if any("attnd.transformers" in line for line in block):
        import transformers
        small = transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=1)
        transformers.LlamaForCausalLM(small).save_pretrained(folder)
        given.update(name=str(folder), AutoModelForCausalLM=transformers.AutoModelForCausalLM)
    return given


def use(names, block):
    """What follows on a block: a call on the daemon."""
    text = "\n".join(block)
    if "attnd.transformers" in text:
        import torch
        assert names["model"](torch.arange(6)[None]).logits.isfinite().all()
    elif "attnd.torch" in text:
        import torch
        q = torch.randn(1, 2, 8, 16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        assert q.grad.isfinite().all()
    elif "attnd.jax" in text:
        assert np.isfinite(names["out"]).all()
    else:
        assert np.isfinite(names["g"].dq).all() and names["g"].dq.shape == names["q"].shape


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_runs(document, engine, monkeypatch, tmp_path):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    names, held = {}, []
    if importlib.util.find_spec("torch"):
        import attnd.torch
        replace = attnd.torch.replace
        monkeypatch.setattr(attnd.torch, "replace", lambda: held.append(replace()))
    try:
        for block in of_kind(document, "python"):
            if missing(block):
                continue
            names.update(names_for(block, tmp_path))
            calls = engine.metric("attnd_requests_total")
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*NaN")
                warnings.simplefilter("ignore", UserWarning)  # of float16, and of this test's own names
                exec("\n".join(block).replace(ADDRESS, engine.address), names)
                use(names, block)
            assert engine.metric("attnd_requests_total") > calls, block
    finally:
        for one in held:
            one.restore()
