"""Compares docs/ with the programs: flags, errors, metrics and options (pytest).

Each comparison yields what differs, and is also given a mistake that it must find.
"""
import ast
import collections
import json
import os
import re
import subprocess
import sys
import time
import urllib.request

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools", "documents"))
import figures  # noqa: E402
import python_reference  # noqa: E402
import reference  # noqa: E402
import site_of_documents as site  # noqa: E402
import wire_reference  # noqa: E402

from reference import ATTNCTL, ATTND  # noqa: E402

COMMANDS = [[], ["info"], ["health"], ["drain"], ["check"], ["bench"], ["estimate"], ["run"], ["top"], ["mask"], ["module"],
            ["completion"]]


def read(*path):
    with open(os.path.join(ROOT, *path)) as file:
        return file.read()


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, text=True).stdout


def table(text, first_cell):
    """The cells of each row whose first one matches."""
    for line in text.split("\n"):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and re.match(first_cell, cells[0]):
            yield cells


def names(cell):
    return re.findall(r"`(?:-\w, )?(?:--)?([\w-]+)`", cell)


# ---- Flags.

def flags_of_help(text):
    """The names of each flag: a set of several where one has more."""
    for line in text.split("\n"):
        found = re.match(r"  ((?:-\w,)?--[\w-]+\S*)", line)
        if found:
            yield set(re.findall(r"--([\w-]+)", found.group(1)))


def test_tables_of_flags_are_what_help_says():
    stale = [page for page, text, wanted in reference.pages() if text != wanted]
    assert not stale, "run ./dev docs"
    flags = reference.sections()
    assert len(sum(flags["docs/FLAGS.md"].values(), [])) + 3 == len(list(flags_of_help(run(ATTND, "--help"))))
    for page, of_page in flags.items():
        text, header = read(page), reference.HEADER[page]
        for heading, rows in of_page.items():
            planted = text.replace(rows[0].row(), rows[0].row() + "x", 1)
            assert planted != text and reference.with_tables(planted, header, of_page) == text, heading


def test_help_is_read_in_each_of_its_forms():
    text = """Options:
  -h,--help                   Print this help message and exit

Group:
  -a,--address TEXT=127.0.0.1:7070 (Env:ATTND_ADDRESS)
                              host:port of --it | more
  --caller_max_calls INT=1024 of --max_calls, for one caller
  --count INT:INT in [1 - 64]=8
                              problems
  --causal {left,right}=true
                              where it begins
  --yes                       do it
  --shared,--no-shared{false} forbids it
"""
    assert [flag.row() for flag in reference.groups(text)["Group"]] == [
        "| `-a, --address` | 127.0.0.1:7070, or ATTND_ADDRESS | host:port of `--it` \\| more |",
        "| `--caller_max_calls` | 1024 | of `--max_calls`, for one caller |", "| `--count` | 8 | problems |",
        "| `--causal` | | where it begins |", "| `--yes` | off | do it |", "| `--no-shared` | off | forbids it |"]


MOST_FLAGS = 61
MOST_WORDS_OF_A_FLAG = 25


def too_many_flags(help_text):
    count = len(list(flags_of_help(help_text)))
    if count > MOST_FLAGS:
        yield f"{count} flags; at most {MOST_FLAGS}"


def long_rows(tables):
    """Rows that name more than one flag, or say more of it than a reader takes in at a glance."""
    for cells in table(tables, r"`-"):
        count = len(cells[2].split())
        if len(names(cells[0])) != 1:
            yield f"{cells[0]}: a row of its own for each flag"
        if not 0 < count <= MOST_WORDS_OF_A_FLAG:
            yield f"{cells[0]}: {count} words; 1 to {MOST_WORDS_OF_A_FLAG}"


def test_flags_are_few_and_each_says_briefly_who_sets_it():
    text, tables = run(ATTND, "--help"), read("docs", "FLAGS.md")
    assert not list(too_many_flags(text)) and not list(long_rows(tables))
    assert list(too_many_flags(text + "".join(f"  --more_{n}\n" for n in range(MOST_FLAGS))))
    for planted, found in (("| `--a` | 1 | " + "word " * 26 + "|", "`--a`: 26 words"), ("| `--a` | 1 | |", "`--a`: 0 words"),
                           ("| `--a`, `--b` | 1 | x |", "`--a`, `--b`: a row")):
        assert [line.startswith(found) for line in long_rows(tables + "\n" + planted)] == [True], planted


def test_flags_that_attnctls_page_names_exist():
    existing = set().union(*(group for command in COMMANDS for group in flags_of_help(run(ATTNCTL, *command, "--help"))))
    assert {"in", "concurrency-range", "once"} < existing
    assert not set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", read("docs", "ATTNCTL.md"))) - existing


def test_documents_name_flags_that_exist():
    existing = set().union(*flags_of_help(run(ATTND, "--help")))
    for page in ("docs/ARCHITECTURE.md", "docs/DEPLOY.md", "docs/ERRORS.md", "docs/METRICS.md", "docs/operate.md",
                 "SECURITY.md"):
        named = set(re.findall(r"`--(\w+_\w+)", read(page)))
        assert named, page
        assert not named - existing, page


# ---- Errors.

def reasons_of_source():
    text = read("proto", "attnd", "v1", "error_reasons.h")
    return dict(re.findall(r'absl::string_view (k\w+) = "([A-Z_]+)";', text))


def test_reasons_are_documented():
    documented = collections.defaultdict(set)
    for code, reason, cause, cure in reference.reasons():
        documented[reason].add(code)
        assert cause.endswith(".") and cure.endswith(".")
    assert len(documented) > 30 and set(documented) == set(reasons_of_source().values())
    codes = set().union(*documented.values())
    assert codes <= {"INVALID_ARGUMENT", "OUT_OF_RANGE", "UNIMPLEMENTED", "FAILED_PRECONDITION", "UNAUTHENTICATED",
                     "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL"}


def test_reasons_of_the_python_client_are_documented():
    known = {reason for array in ("kErrorReasons", "kClientReasons") for _, reason, _, _ in reference.reasons(array)}
    named = set()
    for folder, _, files in os.walk(os.path.join(ROOT, "client", "python", "attnd")):
        for name in files:
            if name.endswith(".py"):
                named |= set(re.findall(r'\breason="([A-Z_]+)"', read(folder, name)))
    assert len(named) > 4 and not named - known


def test_each_reason_has_a_test():
    tests = ""
    for top in ("server", "tests"):
        for folder, _, files in os.walk(os.path.join(ROOT, top)):
            for name in files:
                if re.search(r"_test\.cc$|^test_.*\.py$", name):
                    tests += read(folder, name)
    untested = [name for constant, name in reasons_of_source().items()
                if f'"{name}"' not in tests and f"reason::{constant}" not in tests]
    assert not untested


# ---- Metrics.

@pytest.fixture(scope="module")
def exposed(tmp_path_factory):
    """Returns what a daemon that has had calls tells Prometheus."""
    folder = tmp_path_factory.mktemp("daemon")
    port, metrics_port = folder / "port", folder / "metrics_port"
    process = subprocess.Popen([ATTND, "--listen", "127.0.0.1:0", "--port_file", port, "--metrics_listen", "127.0.0.1:0",
                                "--metrics_port_file", metrics_port, "--backend", "cpu", "--drain_delay", "0"],
                               stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not (port.exists() and metrics_port.exists()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        run(ATTNCTL, "--address", f"127.0.0.1:{port.read_text().strip()}", "check", "--count", "3")
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port.read_text().strip()}/metrics") as answer:
            yield answer.read().decode()
    finally:
        process.terminate()
        process.communicate()


def labels_of(text):
    """{metric: {label: {values}}} of what is exposed; a histogram's buckets are its own."""
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    labels = {name: collections.defaultdict(set) for name in types}
    for sample, pairs in re.findall(r"^(\w+)\{(.*)\} \S+$", text, re.M):
        name = sample if sample in types else re.sub(r"_(bucket|sum|count)$", "", sample)
        for label, value in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', pairs):
            if label not in ("le", "quantile"):
                labels[name][label].add(value)
    return labels


def compare_labels(text, page):
    exposed_labels = labels_of(text)
    for cells in table(page, r"`\w+`$"):
        name = cells[0].strip("`")
        if name in exposed_labels and set(exposed_labels[name]) != set(filter(None, cells[2].split(", "))):
            yield f"{name}: has the labels {sorted(exposed_labels[name])}, documented {cells[2]}"


def wrong_types(text, listed):
    """Series that are exposed and not listed, or as another type."""
    types = {name: kind for name, kind, _, _ in listed}
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M):
        if types.get(name) != kind:
            yield f"{name}: a {kind}, listed as {types.get(name)}"


def test_metrics_are_listed_with_their_types(exposed):
    listed = reference.metrics()
    assert not list(wrong_types(exposed, listed))
    assert list(wrong_types(exposed, [row for row in listed if row[0] != "attnd_ready"])) == [
        "attnd_ready: a gauge, listed as None"]
    # A daemon with a GPU, TLS, spans, modules or an owner of its GPUs has the others, and one whose kernels failed.
    missing = {name for name, _, _, _ in listed} - set(re.findall(r"^# TYPE (\w+) ", exposed, re.M))
    elsewhere = re.compile(r"attnd_(hbm|h2d|d2h|stream|cuda|tls|caller|spans|given|lent|module_duration)(_|$)")
    assert not [name for name in missing if not elsewhere.match(name)]


def test_lists_are_read_as_the_compiler_does():
    source = """inline constexpr absl::string_view kA = "A_1";
inline constexpr Row kRows[] = {
    {"X", reason::kA, "a \\"b\\" {c} "
     "d",
     ""},
    {"Y", "Z", "e", "f"},
};
"""
    assert list(reference.entries(source, "kRows")) == [["X", "A_1", 'a "b" {c} d', ""], ["Y", "Z", "e", "f"]]
    page = f"a\n{reference.REASONS}\n|---|\n| old |\nb\n"
    assert reference.with_rows(page, reference.REASONS, [["A", "", "--b | c", "d"]]) == (
        f"a\n{reference.REASONS}\n|---|---|---|---|\n| A | | `--b` \\| c | d |\nb\n")


def test_labels_of_metrics_are_documented(exposed):
    page = read("docs", "METRICS.md")
    assert not list(compare_labels(exposed, page))
    planted = page.replace("| counter | method, code |", "| counter | method |")
    assert [line.split(":")[0] for line in compare_labels(exposed, planted)] == ["attnd_requests_total"]


def test_status_page_reads_documented_series():
    named = set(re.findall(r"\b(?:attnd|process)_[a-z0-9_]+", read("server", "app", "status_page.html")))
    assert len(named) > 15
    assert not [name for name in sorted(named) if f"| `{name}` |" not in read("docs", "METRICS.md")]


def test_values_of_labels_are_documented(exposed):
    page, labels = read("docs", "METRICS.md"), labels_of(exposed)
    reasons = re.search(r"^Reasons of rejection: (.*?)\. ", page, re.M | re.S).group(1)
    assert labels["attnd_rejected_requests_total"]["reason"] == set(re.findall(r"`(\w+)`", reasons))
    assert labels["attnd_request_stage_duration_seconds"]["stage"] == set(re.findall(r"^- `(\w+)`:", page, re.M))
    meanings = {cells[0].strip("`"): cells[3] for cells in table(page, r"`\w+`$")}
    for metric, label in (("attnd_leases_ended_total", "reason"), ("attnd_lease_lookups_total", "result"),
                          ("attnd_auth_failures_total", "reason"), ("attnd_calls_cut_total", "reason"),
                          ("attnd_calls_cut_total", "stage"), ("attnd_received_bytes_total", "transport")):
        assert labels[metric][label], metric
        for value in labels[metric][label]:
            assert re.search(rf"\b{value}\b", meanings[metric]), (metric, value)


# ---- The C++ client's options.

def options_of(header, structure):
    """{field: default as it is written}"""
    text = re.search(rf"^struct {structure} \{{\n(.*?)^\}};", header, re.M | re.S).group(1)
    return dict(re.findall(r"^  [\w:<>]+(?: \w+>)? (\w+)(?: = (.*?))?;", re.sub(r" *//.*", "", text), re.M))


def as_words(default):
    """A default of the header as the page writes it; None for those that it describes."""
    shifted = re.match(r"int64_t\{(\d+)\} << (\d\d)$", default)
    if shifted:
        return f"{shifted.group(1)} {({'20': 'MiB', '30': 'GiB'})[shifted.group(2)]}"
    time_words = re.match(r"absl::(Seconds|Minutes)\((\d+)\)$", default)
    if time_words:
        return f"{time_words.group(2)} {({'Seconds': 's', 'Minutes': 'min'})[time_words.group(1)]}"
    return default if re.match(r"\d+$|true$|false$", default) else None


def compare_options(header, page):
    documented = {cells[0].strip("`"): cells[1] for cells in table(page[page.index("| `ClientOptions` |"):], r"`[a-z_]+`$")}
    existing = options_of(header, "ClientOptions")
    for name in sorted(set(documented) ^ set(existing)):
        yield f"{name}: documented, or there, but not both"
    for name in sorted(set(documented) & set(existing)):
        words = as_words(existing[name])
        if words and not documented[name].startswith(words):
            yield f"{name}: its default is {words}, documented {documented[name]}"


def test_options_of_the_client_are_documented_with_their_defaults():
    header, page = read("client", "types", "client_options.h"), read("docs", "CLIENT.md")
    assert not list(compare_options(header, page))
    planted = (("{8} << 20;", "{9} << 20;", "shard_bytes"), ("= 8;", "= 9;", "channels_per_address"),
               ("Seconds(30)", "Seconds(31)", "timeout"), ("bool wait_for_ready", "bool waits", "wait_for_ready"))
    for old, new, found in planted:
        assert any(line.startswith(found + ":") for line in compare_options(header.replace(old, new, 1), page)), found


# ---- Python's arguments.

ARGUMENTS = {"connect": ("client.py", "start.md"), "offload": ("modules/interface.py", "MODULES.md")}


def arguments_of(source, function):
    """{argument: its default}, ... for an argument without one."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function]
    of = found.args
    defaults = [None] * (len(of.args) - len(of.defaults)) + [*of.defaults]
    return {argument.arg: ... if default is None else ast.literal_eval(default)
            for argument, default in [*zip(of.args, defaults), *zip(of.kwonlyargs, of.kw_defaults)]}


def compare_arguments(source, function, page):
    rows = page[page.index("| argument"):]
    documented = {cells[0].strip("`"): cells[1].strip("`") for cells in table(rows[:rows.index("\n\n")], "`")}
    existing = arguments_of(source, function)
    for name in sorted(set(documented) ^ set(existing)):
        yield f"{name}: documented, or there, but not both"
    for name in sorted(set(documented) & set(existing)):
        default, words = existing[name], documented[name] or "..."
        is_described = default is None and "else" in words  # what stands in the place of None
        if not is_described and ast.literal_eval(words) != default:
            yield f"{name}: its default is {default}, documented {words}"


@pytest.mark.parametrize("function, planted", [("connect", ("| `retries` | 2 |", "| `retries` | 3 |")),
                                               ("connect", ("| `retries` | 2 |", "| `retry` | 2 |")),
                                               ("offload", ("| `512` |", "| `256` |")),
                                               ("offload", ("`servers`", "`more`"))])
def test_arguments_of_python_are_documented_with_their_defaults(function, planted):
    path, name = ARGUMENTS[function]
    source, page = read("client", "python", "attnd", path), read("docs", name)
    assert not list(compare_arguments(source, function, page))
    assert list(compare_arguments(source, function, page.replace(*planted, 1)))


# ---- Figures.

def test_pages_of_figures_are_made_from_the_results():
    made = figures.pages()
    assert {name + ".md" for name in made} == set(os.listdir(os.path.join(ROOT, "docs", "figures")))
    for name, text in made.items():
        assert text == read("docs", "figures", name + ".md"), "run ./dev docs"
        assert f"(figures/{name}.md)" in read("docs", "PERFORMANCE.md")


# ---- The site.

def test_site_is_built_of_all_documents(tmp_path):
    packages = os.path.join(ROOT, ".deps", "site")
    if not os.path.exists(packages):
        pytest.skip("no MkDocs: ./dev test installs it")
    site.build(str(tmp_path / "site"), packages)
    for page in ("index", "SECURITY", "docs/start", "docs/MASKS", "docs/figures/cpu"):
        assert "<article" in (tmp_path / "site" / (page + ".html")).read_text()
    for page in ("index", "docs/ARCHITECTURE"):  # diagrams are drawn
        text = (tmp_path / "site" / (page + ".html")).read_text()
        assert "flowchart" not in text and re.search(r'<div class="diagram"><svg(.|\n)*</svg></div>', text)
    assert "HBM_PRESSURE" in (tmp_path / "site" / "search" / "search_index.json").read_text()
    assert (tmp_path / "site" / "examples" / "numpy_attention.py").exists()


def test_reference_of_python_has_every_public_name():
    page = python_reference.page()
    for package, path in python_reference.PACKAGES.items():
        names = python_reference.public_names(python_reference.parse(os.path.join(python_reference.SOURCE, path)))
        missing = [name for name in names if f"\n### `{package}.{name}`\n" not in page]
        modules_and_types = {"errors", "local", "metrics", "modules", "Durability", "Optimizer"}
        assert names and set(missing) <= modules_and_types, (package, missing)
    assert "\n#### `attnd.Client.forward`\n" in page


def test_reference_of_the_wire_has_every_call_and_field(tmp_path):
    page = site.generated()["docs/wire_reference.md"]
    for name in ("attention", "capture", "mask", "module", "shared_memory"):
        source = re.sub(r"//.*", "", read("proto", "attnd", "v1", name + ".proto"))
        blocks = re.findall(r"\b(service|message|enum) (\w+)", source)
        rows = re.findall(r"\brpc (\w+)", source) + re.findall(r"(\w+) = \d+;", source)
        section = re.search(rf"^## {name}\.proto\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
        assert blocks and re.findall(r"^### (\w+) `(?:\w+\.)*(\w+)`$", section, re.M) == blocks
        assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.M)) == sorted(rows)
    (tmp_path / "a.proto").write_text("message A {\n  map<string, int32> a;\n}\n")
    with pytest.raises(SystemExit, match="cannot read"):
        wire_reference.page([tmp_path / "a.proto"])


# ---- When it pays off.

def estimate(*flags):
    return json.loads(run(ATTNCTL, "-o", "json", "estimate", "--round-trip-us", "0", *flags))


def wrong_lengths(page):
    """The table of lengths against attnctl estimate; figures are rounded to two digits at least."""
    header = next(table(page, "daemon$"))
    for cells in table(page, "V100|H200|CPU node"):
        row = dict(zip(header, cells))
        rates = ["--shape", "1,1,4096,64", "--remote-tflops", cells[1], "--local-tflops", cells[3]]
        links = {name: name.split()[0] for name in header if name.endswith("Gbit/s")}
        if row["at GB/s"]:
            links["same host"] = str(float(row["at GB/s"]) * 8 / 0.92)
        for name, gbit in links.items():
            length = estimate("--link-gbit", gbit, *rates)["pays_off_from_length"]
            if abs(float(row[name]) - length) > max(0.01 * length, 0.5):
                yield f"{cells[0]}, {cells[2]}, {name}: {length:.0f}, documented {row[name]}"


def wrong_gains(page):
    """README's table of gains against attnctl estimate; figures are rounded to two digits."""
    header, = table(page, "worker's CPU")
    lengths = [re.search(r"N = ([\d,]+)", name) for name in header]
    for cells in table(page, r"\d+$"):
        rates = ["--link-gbit", cells[1], "--local-tflops", str(int(cells[0]) * 0.087), "--remote-tflops", "70.1"]
        for length, documented in zip(lengths, cells):
            if length:
                gain = estimate("--shape", f"8,16,{length.group(1).replace(',', '')},64", *rates)["gain"]
                if abs(float(documented) / gain - 1) > 0.03:
                    yield f"{cells[0]} cores, {length.group(0)}: {gain:.2g}, documented {documented}"
        true = estimate("--shape", "8,16,512,64", *rates)["pays_off_from_length"]
        if abs(float(cells[-1]) / true - 1) > 0.01:
            yield f"{cells[0]} cores, from: {true:.0f}, documented {cells[-1]}"


def printed_estimates(page):
    """(what attnctl prints, what the page shows) of each estimate whose output is shown."""
    for line, shown in re.findall(r"^attnctl (estimate .*)\n```\n\nIt prints:\n\n```text\n(.*?)^```$", page, re.M | re.S):
        yield run(ATTNCTL, *line.split()), shown


def test_an_estimate_that_is_shown_is_what_attnctl_prints():
    page = read("docs", "start.md")
    assert [printed for printed, shown in printed_estimates(page) if printed == shown]
    assert not [shown for printed, shown in printed_estimates(page.replace("17.6 GiB", "17.5 GiB")) if printed == shown]


def wrong_factors(page):
    base = estimate("--shape", "8,16,4096,64", "--link-gbit", "10", "--local-tflops", "1.39")["pays_off_from_length"]
    for name, flags in (("no leases", ["--no-leases"]), ("causal masks", ["--causal"]),
                        ("float32 tensors", ["--dtype", "float32"]), ("KV heads", ["--kv-heads", "4"])):
        cells, = table(page, name)
        length = estimate("--shape", "8,16,4096,64", "--link-gbit", "10", "--local-tflops", "1.39", *flags)
        if abs(float(cells[1]) / (length["pays_off_from_length"] / base) - 1) > 0.01:
            yield f"{name}: {length['pays_off_from_length'] / base:.2f}, documented {cells[1]}"


def wrong_work(page):
    """Bytes and work of a layer, and bytes of a stack: 4·T·width·2."""
    lengths = next(table(page, "one layer and step"))[1:]
    rows = [next(table(page, name))[1:] for name in ("MB on the fuller way", "without leases", "TFLOP", "FLOP per byte")]
    for length, *documented in zip(lengths, *rows):
        shape = ["--shape", f"8,16,{length.split()[-1]},64", "--link-gbit", "10"]
        kept, sent = estimate(*shape), estimate(*shape, "--no-leases")
        for figure, true in zip(documented, (kept["bytes"] / 1e6, sent["bytes"] / 1e6, kept["flops"] / 1e12,
                                             kept["flops"] / kept["bytes"])):
            if abs(float(figure) / true - 1) > 0.015:
                yield f"{length}: {true:.3g}, documented {figure}"
    for cells in table(page, "BERT|Llama"):
        moved = 4 * 16384 * int(re.search(r"(\d+)$", cells[0]).group(1)) * 2
        seconds = [moved * 8 / (0.92e9 * gbit) for gbit in (1, 10)]
        for figure, true in zip([cells[2], *cells[3].split(" / ")], [moved / 1e6, *seconds]):
            if abs(float(figure) - true) > max(0.01 * true, 0.005):
                yield f"{cells[0]}: {true:.3g}, documented {figure}"


def test_gains_in_readme_are_what_attnctl_estimates():
    page = read("README.md")
    assert not list(wrong_gains(page))
    for planted in (("| 6.8 |", "| 7.3 |"), ("| 1057 |", "| 1100 |")):
        assert len(list(wrong_gains(page.replace(*planted)))) == 1, planted


def wrong_layers(page):
    """BERT-base's layers there and here: 12 layers of 12·768² weights, and attention."""
    work = 6 * 12 * 12 * 768 ** 2 * 16384 + 14 * 512 * 16384 * 768 * 12
    rows = page[page.index("| worker | 1 Gbit/s |"):]
    for cells in table(rows, r"\d+ cores"):
        for gbit, documented in zip((1, 10), cells[1:3]):
            there = 4 * 16384 * 768 * 2 * 8 / (0.92e9 * gbit) + work / 70e12
            gain = work / (int(cells[0].split()[0]) * 0.087e12) / there
            if abs(float(documented) / gain - 1) > 0.03:
                yield f"{cells[0]}, {gbit} Gbit/s: {gain:.3g}, documented {documented}"


def wrong_shares(page):
    """Steps a second of 40 workers and eight V100s: the least of what their links, the hosts' links and the GPUs do."""
    attention = estimate("--shape", "8,16,8192,64", "--link-gbit", "10")
    # Bytes of a worker's link, one way after the other, and of each way of a host's, which workers use at the same time.
    steps = [(attention["bytes"], attention["bytes"] * 4 / 6, attention["flops"], 70.1e12),
             (4 * 16384 * 768 * 2, 2 * 16384 * 768 * 2, 6 * 12 * 12 * 768 ** 2 * 16384 + 14 * 512 * 16384 * 768 * 12, 70e12)]
    alone = [40 * 1.39e12 / flops for _, _, flops, _ in steps]
    for cells in table(page, r"none: the workers|\d+ hosts? with"):
        name = re.match(r"(\d+) hosts? with .* (\d+) Gbit", cells[0])
        for n, (moved, each_way, flops, rate) in enumerate(steps):
            true = alone[n]
            if name:
                hosts = int(name.group(1)) * int(name.group(2)) * 0.115e9 / each_way
                true = min(40 * 10 * 0.115e9 / moved, hosts, 8 * rate / flops)
            for documented, figure in zip(cells[1 + 2 * n:3 + 2 * n], (true, true / alone[n])):
                if abs(float(documented.strip("*")) / figure - 1) > 0.03:
                    yield f"{cells[0]}: {figure:.3g}, documented {documented}"


@pytest.mark.parametrize("check, planted", [
    (wrong_shares, ("| 7.9 |", "| 9.8 |")), (wrong_layers, ("| 6.7 |", "| 7.1 |")),
    (wrong_lengths, ("| 1057 |", "| 1100 |")), (wrong_lengths, ("| 37 |", "| 40 |")),
    (wrong_factors, ("| 1.34 |", "| 1.30 |")),
    (wrong_work, ("| 201 |", "| 210 |")), (wrong_work, ("| 101 | 0.88", "| 101 | 0.80"))],
    ids=lambda one: one.__name__ if callable(one) else one[0].strip("| "))
def test_when_it_pays_off_is_what_attnctl_estimates(check, planted):
    page = read("docs", "WHEN.md")
    assert not list(check(page))
    assert len(list(check(page.replace(*planted)))) == 1
