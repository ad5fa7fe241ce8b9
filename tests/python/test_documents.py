"""The blocks of code in README and docs/, pasted: the Python of a page into one new interpreter, from top to bottom, against
a live daemon, and shell commands one by one. A text block right behind Python is what that Python prints. C++ is part of a
program in examples/, which test_examples.py runs.

Each block names its kind: one of KINDS, of which text is shown and not typed, or of TRIED_ELSEWHERE.
"""
import glob
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SERVER
from test_tls import files, mutual  # noqa: F401

PAGES = {  # what the Python of each needs; other pages have none
    "README.md": ["torch"], "docs/start.md": ["torch"], "docs/numpy.md": [], "docs/pytorch.md": ["torch"],
    "docs/jax.md": ["jax"], "docs/transformers.md": ["torch", "transformers", "accelerate"], "docs/operate.md": [],
    "docs/WHEN.md": [], "docs/MASKS.md": [],
    "docs/SPARSE_TRAINING.md": ["torch"], "docs/MODULES.md": ["torch"], "docs/FLEET.md": ["torch"], "docs/DEPLOY.md": []}
PAGES.update({page: [] for page in (
    "SECURITY.md", "CONTRIBUTING.md", "docs/ATTNCTL.md", "docs/ARCHITECTURE.md", "docs/CLIENT.md", "docs/ERRORS.md",
    "docs/FLAGS.md", "docs/KERNELS.md", "docs/METRICS.md", "docs/NUMERICS.md", "docs/PERFORMANCE.md", "docs/README.md",
    "docs/TESTING.md")})
LESS = {"--count": "5", "--max-size": "1024", "--duration": "0.3", "--concurrency-range": "1:2"}  # the same of less work
KINDS = ("python", "sh", "cpp", "text", "mermaid")
ADDRESS, PROXY = "127.0.0.1:7070", "proxy:7443"  # of the documents
WORKERS = "2"  # of torchrun
TRIED_ELSEWHERE = {  # a kind of block, or a program, that needs root, a cluster or a network → what tries the same
    "cmake": ("deploy/bundle_test.py", "find_package("), "cc": ("deploy/bundle_test.py", "pkg-config"),
    "ini": ("tests/python/test_slurm.py", "prolog.sh"), "sbatch": ("tests/python/test_slurm.py", '"sbatch"'),
    "yaml": ("deploy/kubernetes_test.py", "own_overlay("), "kubectl": ("deploy/kubernetes_test.py", "kustomize("),
    "helm": ("deploy/chart_test.py", "helm_documents("), "podman": ("deploy/release_test.py", "umoci"),
    "systemctl": ("deploy/deploy_test.py", "verify_unit("), "envoy": ("tests/python/test_envoy.py", '"validate"'),
    "pip": ("tests/python/test_package.py", "readme_blocks("), "python3": ("tests/python/test_package.py", "readme_blocks("),
    ".": ("tests/python/test_package.py", "readme_blocks(")}
# These change the reader's host; the files that they name are looked up.
OF_THE_HOST = ("apt-get", "cat", "cp", "echo", "export", "mkdir", "tar")


def read(page):
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        return file.read()


def fences(text):
    """(kind, its lines as one string) of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def of_kind(page, kind):
    return [block for found, block in fences(read(page)) if found == kind]


def wrong_blocks(page, text):
    """Blocks of no kind, and indented ones, which have none."""
    for kind, block in fences(text):
        if kind not in KINDS and kind not in TRIED_ELSEWHERE:
            yield f"{page}: a block of kind {kind or 'none'}: {block.splitlines()[0]}"
    for line in re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S).split("\n"):
        if line.startswith("    "):
            yield f"{page}: an indented block: {line}"


def test_all_pages_are_tried():
    found = {f"docs/{name}" for name in os.listdir(os.path.join(ROOT, "docs")) if name.endswith(".md")}
    assert not found - {*PAGES}


def test_what_is_tried_elsewhere_is():
    for path, words in TRIED_ELSEWHERE.values():
        assert words in read(path), path


def single_spaced(text):
    return " ".join(text.split())


def test_cpp_is_part_of_a_program():
    programs = [single_spaced(read(f"examples/{name}")) for name in os.listdir(os.path.join(ROOT, "examples"))
                if name.endswith(".cc")]
    blocks = [single_spaced(block) for page in PAGES for block in of_kind(page, "cpp")]
    assert len(blocks) > 3 and not [block for block in blocks if not any(block in program for program in programs)]


def test_each_block_says_what_it_is():
    pages = [name for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "tools/**/*.md")
             for name in glob.glob(pattern, root_dir=ROOT, recursive=True)]
    assert {*PAGES, "docs/runbooks/AttndDown.md", "deploy/helm/attnd/README.md"} < set(pages)
    assert not [wrong for page in pages for wrong in wrong_blocks(page, read(page))]
    for planted in ("\n```\na\n```\n", "\n```bash\na\n```\n", "\n    a\n"):
        assert list(wrong_blocks("README.md", read("README.md") + planted))


def printed_form(text):
    """Lines without their numbers."""
    return [re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line.strip()) for line in text.splitlines() if line.strip()]


def expected_output(page):
    """Returns, for each Python block that has an output, the output's lines."""
    return [line for _, shown in re.findall(r"^```python\n(.*?)^```\n```text\n(.*?)^```$", read(page), re.M | re.S)
            for line in printed_form(shown)]


def run(words, address, cwd=ROOT, **variables):
    environment = {**os.environ, "ATTND_ADDRESS": address, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1",
                   "HF_HUB_OFFLINE": "1", "PATH": f"{os.path.dirname(SERVER)}:{os.environ['PATH']}", **variables}
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment,
                          timeout=600)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def programs(page):
    """Returns the page's Python: a block that begins with a file's name, as in "# train.py", is a program of its own."""
    found = [""]
    for block in of_kind(page, "python"):
        if re.match(r"# \w+\.py\n", block):
            found.append("")
        found[-1] += block + "\n"
    return list(filter(None, found))


def paste(page, address, folder):
    """Returns what the page's Python prints."""
    printed = ""
    for text in programs(page):
        program = folder / "page.py"
        program.write_text(text.replace(ADDRESS, address).replace(PROXY, address))
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", WORKERS]
        printed += run([sys.executable, *(ranks if "init_process_group" in text else []), str(program)], address, folder)
    return printed


@pytest.fixture
def served(request, page, tmp_path):
    """The daemon that a page means: behind a proxy it asks for certificates, which lie in the folder then."""
    if PROXY not in read(page):
        return request.getfixturevalue("daemon")
    path_of = request.getfixturevalue("files")
    for name, here in (("ca.crt", "ca.pem"), ("caller.crt", "me.crt"), ("caller.key", "me.key")):
        shutil.copy(path_of(name), tmp_path / here)
    return request.getfixturevalue("mutual")


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=[pytest.mark.rare("documents")] if page not in ("README.md", "docs/start.md") else [])
    for page in PAGES if of_kind(page, "python")])
def test_python_runs_as_pasted_and_prints_what_is_shown(page, served, tmp_path):
    for package in PAGES[page]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}")  # one of "torch", "jax", "transformers"
    calls = served.metric("attnd_requests_total") + served.metric("attnd_module_rows_total")
    printed = printed_form(paste(page, served.address, tmp_path))
    assert served.metric("attnd_requests_total") + served.metric("attnd_module_rows_total") > calls
    for line in expected_output(page):
        assert line in printed, (line, printed)
        printed = printed[printed.index(line) + 1:]


def test_python_of_arrays_runs_on_a_gpu_without_float32(gpu_daemon, tmp_path):
    paste("docs/numpy.md", gpu_daemon.address, tmp_path)


@pytest.mark.rare("documents")
def test_first_training_runs_on_a_v100(gpu_daemon, tmp_path):
    """README's, on an emulated one: two steps."""
    pytest.importorskip("torch")
    program, = of_kind("README.md", "python")
    assert "range(101)" in program
    (tmp_path / "page.py").write_text(program.replace("range(101)", "range(2)").replace(ADDRESS, gpu_daemon.address))
    assert "step 0: loss 2." in run([sys.executable, str(tmp_path / "page.py")], gpu_daemon.address, tmp_path)


def commands(page):
    for block in of_kind(page, "sh"):
        lines = block.replace("\\\n", " ").splitlines()
        yield from filter(None, (shlex.split(line, comments=True) for line in lines))


def less_work(words):
    """attnctl's words with smaller numbers, since the emulated GPU computes 1e8 FLOP a second."""
    always = {"check": "--count", "bench": "--duration", "top": "--once"}
    words = [LESS.get(before, word) for before, word in zip(["", *words], words)]
    if "bench" in words:
        words = ["1,2,64,64" if before == "--shape" else word for before, word in zip(["", *words], words)]
        words += ["--warmup", "0"] + ([] if "--shape" in words else ["--shape", "1,2,64,64"])
    for command, flag in always.items():
        if command in words and flag not in words:
            words += [flag, LESS[flag]] if flag in LESS else [flag]
    return words


def try_command(words, address, metrics_port, folder):
    """Runs it, or for the long ones sees that there is such a command, and for the others that the files it names exist."""
    words = [word.replace("127.0.0.1:9464", f"127.0.0.1:{metrics_port}") for word in words]
    words = [address if word in (ADDRESS, PROXY) and "--listen" not in words else word for word in words]
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    for path in missing_files(words):
        raise AssertionError(f"{path} is not there: {words}")
    if words[0] == "attnctl":
        run([os.path.join(ROOT, "bazel-bin/client/attnctl"), *less_work(words[1:])], address, folder,
            ATTND_METRICS=f"http://127.0.0.1:{metrics_port}/metrics")
    elif words[0] == "attnd":
        more = [] if "--check_config" in words else ["--check_config"]
        run([os.path.join(ROOT, "bazel-bin/server/attnd"), *words[1:], "--backend", "cpu", *more], address, folder)
    elif words[0] == "openssl":
        run(words, address, folder)
    elif words[0] == "./dev":
        assert words[1] in run(["./dev", "help", words[1]], address)
    elif words[0] == "torchrun":
        assert words[-1] in read("docs/FLEET.md")
    else:
        assert words[0] in {*TRIED_ELSEWHERE, *OF_THE_HOST}, words


def missing_files(words):
    """Finds files that are not in the repository, nor in the bundle, which has these folders of deploy/."""
    for word in words:
        path = word.replace("/opt/attnd/", "deploy/")
        if path.startswith("deploy/") and not os.path.exists(os.path.join(ROOT, path)):
            yield word


@pytest.mark.rare("documents")
@pytest.mark.parametrize("page, engine", [
    *((page, "served") for page in PAGES if of_kind(page, "sh")),
    *((page, "gpu_daemon") for page in ("README.md", "docs/start.md", "docs/operate.md"))])
def test_commands_succeed(page, engine, request, tmp_path):
    asked = request.getfixturevalue(engine)
    write_tensors(tmp_path / "x.safetensors")
    for words in commands(page):
        try_command(words, asked.address, asked.metrics_port, tmp_path)


def write_tensors(path):
    """q, k and v of float16, for `attnctl run`."""
    size = 2 * 8 * 16 * 2
    header = json.dumps({name: {"dtype": "F16", "shape": [1, 2, 8, 16], "data_offsets": [n * size, (n + 1) * size]}
                         for n, name in enumerate("qkv")}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3 * size))


def test_a_wrong_command_is_found(daemon, tmp_path):
    for line in ("attnctl --address 127.0.0.1:7070 inf", "./dev nothing", "attnd --nothing", "curl 127.0.0.1",
                 "cp /opt/attnd/none /etc", "kubectl apply -k deploy/kubernetes/overlays/none"):
        with pytest.raises(AssertionError):
            try_command(line.split(), daemon.address, daemon.metrics_port, tmp_path)


def test_an_output_that_is_not_printed_is_found():
    assert printed_form("step 50: loss 0.024\n\n(2, 64)") == ["step 0: loss 0", "(0, 0)"]
    assert expected_output("docs/pytorch.md")[0] == "True"
