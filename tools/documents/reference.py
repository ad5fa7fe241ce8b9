"""Writes the tables of reference pages for `./dev docs`: flags in docs/FLAGS.md and docs/ATTNCTL.md from what programs print
for --help, docs/ERRORS.md, docs/METRICS.md and the notes of Python errors from the lists in the source that programs use.

    python3 tools/documents/reference.py [--check]      (needs bazel-bin/server/attnd and bazel-bin/client/attnctl)

A page keeps its prose; its tables are replaced. --check writes nothing and exits with 1 where a page is not what would be
written.
"""
import json
import os
import re
import subprocess
import sys
import textwrap
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ATTND, ATTNCTL = os.path.join(ROOT, "bazel-bin/server/attnd"), os.path.join(ROOT, "bazel-bin/client/attnctl")
COMMANDS = ("drain", "check", "bench", "estimate", "mask", "run", "top")  # of attnctl, those with flags of their own
OF_THIS_MACHINE = {"--memory_limit_mib": "a quarter of the machine, 256 to 4096"}
NAMES = re.compile(r"  ((?:-\w,)?--[\w-]+(?:,--[\w-]+)*)")
COLUMN = 30  # at which CLI11 begins what a flag means, or the line after
HEADER = {"docs/FLAGS.md": "| flag | default | what it is, and when to set it |",
          "docs/ATTNCTL.md": "| flag | default | meaning |"}


class Flag(NamedTuple):
    names: str
    default: str
    words: str

    def row(self):
        words = re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", self.words).replace("|", "\\|")
        return f"| `{self.names}` | {self.default} | {words} |".replace("|  |", "| |")


def default_of(names, kind):
    """kind: what help prints between the names and their meaning."""
    for name, text in OF_THIS_MACHINE.items():
        if name in names:
            return text
    value, variable = re.search(r"^\w+(?::[^=]*)?=\[?(.*?)\]?(?: |$)", kind), re.search(r"Env:(\w+)", kind)
    stated = value[1] if value else "off" if re.match(r"(\{false\})?$", kind) else ""
    return ", or ".join(filter(None, [stated, variable and variable[1]]))


def groups(help_text):
    """{title: its flags}, but --help, --version and --config, which prose describes."""
    found, title, lines = {}, None, help_text.split("\n")
    for number, line in enumerate(lines):
        if re.match(r"[A-Z][\w ]*:$", line):
            title = line[:-1]
        flag = NAMES.match(line)
        if not (flag and title) or re.match(r"(-h,)?--(help|version|config)$", flag[1]):
            continue
        below = lines[number + 1]
        on_line_below = below.startswith(" " * COLUMN)
        kind, words = (line, below) if on_line_below else (line[:COLUMN], line[COLUMN:])
        names = flag[1].split(",")[-1] if "--no-" in flag[1] else flag[1].replace(",", ", ")
        found.setdefault(title, []).append(Flag(names, default_of(flag[1], kind[flag.end():].strip()), words.strip()))
    return found


def help_of(*command):
    return subprocess.run([*command, "--help"], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


def sections():
    """{page: {heading: its flags}}"""
    commands = {command: groups(help_of(ATTNCTL, command)) for command in COMMANDS}
    attnctl = {"Flags of all commands": groups(help_of(ATTNCTL))["Options"],
               "Flags of a problem": commands["bench"]["Problem"]}
    attnctl.update({command: found["Options"] for command, found in commands.items() if "Options" in found})
    return {"docs/FLAGS.md": groups(help_of(ATTND)), "docs/ATTNCTL.md": attnctl}


def with_tables(text, header, flags):
    """The page with each heading's table of flags; one that has none gets it at its end."""
    for heading, rows in flags.items():
        table = "\n".join([header, "|---|---|---|", *(flag.row() for flag in rows)]) + "\n"
        section = re.search(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", text, re.M | re.S)
        if section is None:
            raise SystemExit(f"reference.py: no section {heading}")
        kept, count = re.subn(r"^\| flag \|.*\n(?:\|.*\n)+", lambda _: table, section[0], count=1, flags=re.M)
        if not count:
            kept = section[0].rstrip("\n") + "\n\n" + table + ("\n" if section.end() < len(text) else "")
        text = text[:section.start()] + kept + text[section.end():]
    return text


# ---- Lists in C++: errors and metrics.

def read(page):
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        return file.read()


def entries(source, array):
    """The rows of strings of that array; a constant of the file stands for its value."""
    constants = dict(re.findall(r'absl::string_view (k\w+) = "([^"]*)";', source))
    body = re.search(rf"\b{array}\[\] = \{{\n(.*?)^\}};", source, re.M | re.S)[1]
    for row in re.findall(r"\{((?:\"(?:[^\"\\]|\\.)*\"|[^{}\"])*)\}", body):
        cells = re.findall(r'reason::(k\w+)|((?:"(?:[^"\\]|\\.)*"\s*)+)', row)
        yield [constants[name] if name else "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literal)).replace('\\"', '"')
               for name, literal in cells]


def reasons(array="kErrorReasons"):
    """[code, name, cause, what to do]"""
    return list(entries(read("proto/attnd/v1/error_reasons.h"), array))


def metrics():
    """[name, type, labels, meaning]"""
    return list(entries(read("server/metrics/metric_list.cc"), "kMetrics"))


def table_rows(lines):
    """Makes the rows of a table in Markdown, with flags as code."""
    for cells in lines:
        words = [re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", cell).replace("|", "\\|") for cell in cells]
        yield f"| {' | '.join(words)} |".replace("|  |", "| |")


def with_rows(text, header, lines):
    """The page with these rows below the line of that header."""
    table = "".join(line + "\n" for line in (header, "|---" * header.count(" | ") + "|---|", *table_rows(lines)))
    replaced, count = re.subn(rf"^{re.escape(header)}\n(?:\|.*\n)+", lambda _: table, text, count=1, flags=re.M)
    if not count:
        raise SystemExit(f"reference.py: no table {header}")
    return replaced


REASONS = "| code | reason | cause | what to do |"
CLIENT_REASONS = "| code | reason of a client | cause | what to do |"
METRICS = "| series | type | labels | meaning |"


def errors_page(text):
    return with_rows(with_rows(text, REASONS, reasons()), CLIENT_REASONS, reasons("kClientReasons"))


def metrics_page(text):
    return with_rows(text, METRICS, [[f"`{name}`", *cells] for name, *cells in metrics()])


CURES = "client/python/attnd/_cures.py"
CURES_HEAD = '''"""The notes of errors, by (code, reason): what to do. `./dev docs` writes this file."""
from __future__ import annotations

from typing import Dict, Tuple

CURES: Dict[Tuple[str, str], str] = {
'''


def cures():
    """Returns the Python file of what to do; a message about an argument says it itself."""
    lines = ""
    for code, name, _, cure in reasons() + reasons("kClientReasons"):
        if code != "INVALID_ARGUMENT":
            words = textwrap.wrap(cure.replace("`", ""), 110, break_on_hyphens=False)
            literal = "\n".join(f"        {json.dumps(part + ' ' * (n + 1 < len(words)))}" for n, part in enumerate(words))
            lines += f'    ("{code}", "{name}"):\n{literal},\n'
    return CURES_HEAD + lines + "}\n"


def pages():
    """(path, what it says, what it should)"""
    yield CURES, read(CURES) if os.path.exists(os.path.join(ROOT, CURES)) else "", cures()
    for page, flags in sections().items():
        yield page, read(page), with_tables(read(page), HEADER[page], flags)
    for page, wanted in (("docs/ERRORS.md", errors_page), ("docs/METRICS.md", metrics_page)):
        yield page, read(page), wanted(read(page))


def main(check):
    stale = [page for page, text, wanted in pages() if text != wanted]
    for page, _, wanted in [] if check else list(pages()):
        with open(os.path.join(ROOT, page), "w", encoding="utf-8") as file:
            file.write(wanted)
    if check and stale:
        raise SystemExit(f"{', '.join(stale)}: run ./dev docs")


if __name__ == "__main__":
    main(sys.argv[1:] == ["--check"])
