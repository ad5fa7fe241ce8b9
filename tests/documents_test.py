"""What docs/ says of flags, errors, metrics and options against what the programs say themselves (pytest).

Each comparison yields what differs, and is also given a mistake that it must find.
"""
import collections
import json
import os
import re
import subprocess
import time
import urllib.request

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ATTND = os.path.join(ROOT, "bazel-bin", "server", "attnd")
ATTNCTL = os.path.join(ROOT, "bazel-bin", "client", "attnctl")
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


def beginning(text):
    """The value with which a default's description begins; None where it begins otherwise."""
    found = re.match(r"`?(-?[\w.:]+)`?(?=$|[ ,:])", text)
    return found and found.group(1).rstrip(":")


# ---- Flags.

def flags_of_help(text):
    """[({a flag's names}, its default or None)]"""
    for line in text.split("\n"):
        found = re.match(r"  ((?:-\w,)?--[\w-]+\S*)(?: (?:INT|FLOAT|TEXT)\S*?=\[?([^\s\]]+)\]?)?", line)
        if found:
            yield set(re.findall(r"--([\w-]+)", found.group(1))), found.group(2)


def flags_of_tables(text):
    """{name: default or None}"""
    flags = {}
    for cells in table(text, r"`-"):
        here, defaults = names(cells[0]), cells[1].split(", ")
        if len(defaults) != len(here):
            defaults = [cells[1]] + [""] * (len(here) - 1)
        flags.update(zip(here, map(beginning, defaults)))
    return flags


def same(one, other):
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def compare_flags(help_text, tables, elsewhere=(), of_this_machine=()):
    documented, existing = flags_of_tables(tables), list(flags_of_help(help_text))
    every_name = set().union(*(group for group, _ in existing))
    for name in sorted(set(documented) - every_name):
        yield f"--{name}: documented, and there is none"
    for group, default in existing:
        written = [name for name in group if name in documented]
        if not written and not group & set(elsewhere):
            yield f"--{min(group)}: not documented"
        for name in written:
            stated = documented[name]
            if default and stated and name not in of_this_machine and not same(default, stated):
                yield f"--{name}: its default is {default}, documented {stated}"


def test_flags_of_the_daemon_are_documented_with_their_defaults():
    text, tables = run(ATTND, "--help"), read("docs", "FLAGS.md")
    prose = {"help", "version", "config", "check_config"}
    assert all(f"--{name}" in tables for name in prose - {"version"})
    assert not list(compare_flags(text, tables, prose, {"memory_limit_mib"}))
    assert len(flags_of_tables(tables)) > 35
    for planted, found in (("| `--none` | 1 | x |", "--none: documented"),
                           ("| `--max_calls` | 5 | x |", "--max_calls: its default"),
                           ("| `--log_level` | text | x |", "--log_level: its default")):
        assert any(line.startswith(found) for line in compare_flags(text, tables + "\n" + planted, prose)), planted
    assert "--max_calls: not documented" in compare_flags(text, tables.replace("`--max_calls`", "`calls`"), prose)


MOST_FLAGS = 54
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


def test_flags_of_attnctl_are_documented():
    page = read("docs", "ATTNCTL.md")
    everywhere = page[page.index("## Flags of all commands"):page.index("| exit code")]
    assert not list(compare_flags(run(ATTNCTL, "--help"), everywhere, {"help"}))
    assert len(flags_of_tables(everywhere)) > 10
    existing = set().union(*(group for command in COMMANDS for group, _ in flags_of_help(run(ATTNCTL, *command, "--help"))))
    assert {"in", "concurrency-range", "once"} < existing
    assert not set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", page)) - existing


def test_documents_name_flags_that_exist():
    existing = set().union(*(group for group, _ in flags_of_help(run(ATTND, "--help"))))
    for page in ("docs/ARCHITECTURE.md", "docs/DEPLOY.md", "docs/ERRORS.md", "docs/METRICS.md", "SECURITY.md"):
        named = set(re.findall(r"`--(\w+_\w+)", read(page)))
        assert named, page
        assert not named - existing, page


# ---- Errors.

def reasons_of_source():
    text = read("server", "call", "status_details.h")
    text = text[text.index("namespace reason"):]
    return dict(re.findall(r'absl::string_view (k\w+) = "([A-Z_]+)";', text))


def test_reasons_are_documented():
    documented = collections.defaultdict(set)
    for code, reason, cause, cure in table(read("docs", "ERRORS.md"), r"[A-Z_]+$"):
        documented[reason].add(code)
        assert cause and (cure or code == "CANCELLED")
    assert len(documented) > 30 and set(documented) == set(reasons_of_source().values())
    codes = set().union(*documented.values())
    assert codes <= {"INVALID_ARGUMENT", "OUT_OF_RANGE", "UNIMPLEMENTED", "FAILED_PRECONDITION", "UNAUTHENTICATED",
                     "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL"}


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
    """What a daemon that has had calls tells Prometheus."""
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


@pytest.mark.parametrize("check, planted", [
    (wrong_lengths, ("| 1057 |", "| 1100 |")), (wrong_lengths, ("| 37 |", "| 40 |")),
    (wrong_factors, ("| 1.34 |", "| 1.30 |")),
    (wrong_work, ("| 201 |", "| 210 |")), (wrong_work, ("| 101 | 0.88", "| 101 | 0.80"))],
    ids=lambda one: one.__name__ if callable(one) else one[0].strip("| "))
def test_when_it_pays_off_is_what_attnctl_estimates(check, planted):
    page = read("docs", "WHEN.md")
    assert not list(check(page))
    assert len(list(check(page.replace(*planted)))) == 1
