"""How the documents are written and whether their pictures render, as far as a machine can tell (pytest).

Each rule is a generator over {path: text} that yields "path: what is wrong". It runs on the documents of this
repository, and on PLANTED below, a violation that it must find.
"""
import glob
import os
import posixpath
import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORDS = os.path.join(ROOT, "tests/words.txt")
FOLDERS = ("base", "net", "attention", "modules", "kernels", "proto", "server", "client", "examples", "tools", "tests",
           "deploy", "third_party")


def load_documents():
    """The documents, and their pictures."""
    names = ["README.md", "SECURITY.md", "CONTRIBUTING.md"]
    for pattern in ("docs/*.md", "docs/figures/*.md", "docs/pictures/*.svg"):
        names += sorted(glob.glob(pattern, root_dir=ROOT))
    documents = {}
    for name in names:
        with open(os.path.join(ROOT, name), encoding="utf-8") as file:
            documents[name] = file.read()
    return documents


def pages(documents):
    return {name: text for name, text in documents.items() if name.endswith(".md")}


# ---- Rules.

def decisions(documents):
    """(title, lines) of each decision: a heading of the third level in ARCHITECTURE's section Decisions."""
    section = re.search(r"^## Decisions\n(.*?)(?=^## |\Z)", documents.get("docs/ARCHITECTURE.md", ""), re.M | re.S)
    for part in re.split(r"^### ", section.group(1) if section else "", flags=re.M)[1:]:
        title, *lines = part.split("\n")
        yield title, [line for line in lines if line.strip()]


def whole_decisions(documents):
    """Each states context, decision and consequence."""
    if "docs/ARCHITECTURE.md" in documents and not list(decisions(documents)):
        yield "docs/ARCHITECTURE.md: no decisions"
    for title, lines in decisions(documents):
        for part in ("- Context: ", "- Decision: ", "- Consequence: "):
            if not any(line.startswith(part) for line in lines):
                yield f"docs/ARCHITECTURE.md: {title}: no line that begins with {part}"


def figures_are_current(documents):
    """Each quantity in README's table of figures stands in PERFORMANCE.md too."""
    table = re.search(r"^\| figure .*\n\|[-|]+\n((?:\|.*\n)+)", documents.get("README.md", ""), re.M)
    if "README.md" in documents and not table:
        yield "README.md: no table of figures"
    for row in table.group(1).splitlines() if table else []:
        for quantity in re.findall(r"\d[\d.]*", "|".join(row.split("|")[2:4])):
            if not re.search(rf"(?<![\d.]){re.escape(quantity)}(?!\.?\d)", documents.get("docs/PERFORMANCE.md", "")):
                yield f"README.md: {quantity} is not in docs/PERFORMANCE.md: {row}"


def answers_are_in_the_tables(documents):
    """Each quantity of PERFORMANCE's answers and losses with a fraction or three digits stands on a page of figures too."""
    tables = "".join(text for name, text in documents.items() if name.startswith(("docs/figures/", "docs/WHEN.md")))
    for line in documents.get("docs/PERFORMANCE.md", "").split("\n"):
        for quantity in re.findall(r"(?<![\w.,])(?:\d[\d,]*\.\d+(?:e-\d+)?|\d{3,})(?![\w,.]*\d)", line):
            if not re.search(rf"(?<![\d.,]){re.escape(quantity)}(?![\d])", tables):
                yield f"docs/PERFORMANCE.md: {quantity} is on no page of figures: {line}"


def one_number_in_a_cell(documents):
    """In tables of figures two numbers with a slash or a semicolon between them are two cells."""
    for name, text in documents.items():
        for line in text.split("\n") if name.startswith("docs/figures/") else []:
            if re.match(r"\|.*\d\**\s*[/;→]\s*\**\d", line):
                yield f"{name}: more than one number in a cell: {line}"


def paths_exist(documents):
    """Each `folder/file` that a document names is there; smNN and the like stand for a choice."""
    for name, text in pages(documents).items():
        for path in re.findall(r"`([a-z0-9_]+/[a-z0-9_./-]*)`", text):
            if path.split("/")[0] in FOLDERS and not os.path.exists(os.path.join(ROOT, path)):
                yield f"{name}: there is no {path}"


# ---- Pictures.

NODE = re.compile(r'([A-Z]\w*)(?:\["([^"\]]+)"\]|\[\("([^"\]]+)"\)\])')  # Id["text"], Id[("text")]
EDGE = re.compile(r'([A-Z]\w*) <?-->(?:\|"[^"|]+"\|)? ([A-Z]\w*)')  # A --> B, A <--> B, A -->|"text"| B


def diagram_errors(lines):
    """The part of Mermaid's flowcharts that is used here; ids in capitals are none of its words (end, call, click)."""
    if not lines or not re.fullmatch(r"flowchart (LR|RL|TB|BT)", lines[0]):
        yield "does not begin with flowchart and a direction"
    depth, named, joined = 0, [], set()
    for line in filter(None, (line.strip() for line in lines[1:])):
        node, edge = NODE.fullmatch(line), EDGE.fullmatch(line)
        if node:
            named.append(node.group(1))
        elif edge:
            joined |= set(edge.groups())
        elif re.fullmatch(r'subgraph [A-Z]\w*\["[^"\]]+"\]', line):
            depth += 1
        elif line == "end" and depth:
            depth -= 1
        else:
            yield f"neither node, edge, subgraph nor end: {line}"
    if depth:
        yield "a subgraph without end"
    for name in sorted({name for name in named if named.count(name) > 1}):
        yield f"{name} is named twice"
    for name in sorted(set(named) ^ joined):
        yield f"{name} is named and not joined, or joined and not named"


def diagrams_render(documents):
    """Each Mermaid diagram is well-formed; ARCHITECTURE has two, or one and a picture."""
    for name, text in pages(documents).items():
        diagrams = re.findall(r"^```mermaid\n(.*?)^```$", text, re.M | re.S)
        if text.count("```mermaid") != len(diagrams):
            yield f"{name}: a diagram without end"
        if name == "docs/ARCHITECTURE.md" and len(diagrams) + text.count(".svg)") < 2:
            yield f"{name}: {len(diagrams)} diagrams, expected the life of a request and the folders"
        for diagram in diagrams:
            for error in diagram_errors(diagram.split("\n")):
                yield f"{name}: diagram: {error}"


def pictures_render(documents):
    """Each SVG is well-formed, has a size and text, and is shown by a document; each that is shown exists."""
    shown = set()
    for name, text in pages(documents).items():
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", text):
            shown.add(posixpath.normpath(posixpath.join(posixpath.dirname(name), target)))
    svgs = {name: text for name, text in documents.items() if name.endswith(".svg")}
    for name in sorted(shown ^ set(svgs)):
        yield f"{name}: shown and not there, or there and not shown"
    for name, text in svgs.items():
        try:
            root = xml.etree.ElementTree.fromstring(text)
        except xml.etree.ElementTree.ParseError as error:
            yield f"{name}: {error}"
            continue
        if root.tag != "{http://www.w3.org/2000/svg}svg" or not {"width", "height", "viewBox"} <= set(root.attrib):
            yield f"{name}: no svg of a size"
        if not any(element.text for element in root.iter("{http://www.w3.org/2000/svg}text")):
            yield f"{name}: no text"


RULES = [whole_decisions, figures_are_current, answers_are_in_the_tables, one_number_in_a_cell, paths_exist, diagrams_render,
         pictures_render]

DECISION = "## Decisions\n\n### Raw\n- Context: a.\n- Decision: b.\n- Consequence: c.\n"
FIGURES = "| figure | attnd | next best |\n|---|---|---|\n| a | 1.5 | 320 |\n"
DIAGRAM = 'flowchart LR\n  subgraph S["s"]\n    A["a: b/c"]\n  end\n  B[("b")]\n  A --> B\n  B -->|"to"| A\n'
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" viewBox="0 0 9 9"><text>a</text></svg>'


def page_of(diagram):
    return {"docs/A.md": f"# A\n\n```mermaid\n{diagram}```\n"}


PLANTED = {
    whole_decisions: [{"docs/ARCHITECTURE.md": DECISION.replace("- Consequence: ", "- ")},
                      {"docs/ARCHITECTURE.md": "# Architecture\n"}],
    figures_are_current: [{"README.md": FIGURES, "docs/PERFORMANCE.md": "1.5, 65 / 32"},
                          {"README.md": FIGURES, "docs/PERFORMANCE.md": "11.5, 320"}, {"README.md": "# A\n"}],
    answers_are_in_the_tables: [{"docs/PERFORMANCE.md": "it is 7.3 times", "docs/figures/a.md": "| 17.3 | 7.35 |"},
                                {"docs/PERFORMANCE.md": "it is 720", "docs/figures/a.md": "| 1720 |"}],
    one_number_in_a_cell: [{"docs/figures/a.md": "| 1.2 / 3 |"}, {"docs/figures/a.md": "| a | 4; **5** |"}],
    paths_exist: [{"docs/A.md": "see `server/none.h`\n"}, {"docs/A.md": "see `tests/none/`\n"}],
    diagrams_render: [page_of(DIAGRAM.replace("flowchart LR", "flowchat LR")), page_of(DIAGRAM.replace("  end\n", "")),
                      page_of(DIAGRAM.replace('"a: b/c"]', '"a: b/c"')), page_of(DIAGRAM.replace("A", "call")),
                      page_of(DIAGRAM + '  C["c"]\n'), page_of(DIAGRAM + "  A --> C\n"), page_of(DIAGRAM + "  A -> B\n"),
                      page_of(DIAGRAM + '  A["again"]\n'), {"docs/A.md": "```mermaid\n" + DIAGRAM},
                      {"docs/ARCHITECTURE.md": page_of(DIAGRAM)["docs/A.md"]}],
    pictures_render: [{"docs/pictures/a.svg": SVG}, {"README.md": "![a](docs/pictures/a.svg)\n"},
                      {"docs/A.md": "![a](pictures/a.svg)\n", "docs/pictures/a.svg": SVG.replace("</text>", "")},
                      {"docs/A.md": "![a](pictures/a.svg)\n", "docs/pictures/a.svg": SVG.replace("width", "w")},
                      {"docs/A.md": "![a](pictures/a.svg)\n", "docs/pictures/a.svg": SVG.replace("text", "path")}],
}
# The same rules let these pass.
KEPT = {
    whole_decisions: [{"docs/ARCHITECTURE.md": DECISION + "more\n" * 3 + "\n## Next\n" + "more\n" * 9}],
    figures_are_current: [{"README.md": FIGURES, "docs/PERFORMANCE.md": "| 1.5 / 2 | 65 / 320 |"}],
    answers_are_in_the_tables: [{"docs/PERFORMANCE.md": "it is **7.3** and 720.", "docs/figures/a.md": "| 7.3 | 720 |"}],
    one_number_in_a_cell: [{"docs/figures/a.md": "| PyTorch / attnd | 1.2 | 82 to 98 |\n1 / 2\n"}],
    paths_exist: [{"docs/A.md": "`tests/words_test.py`, `tests/`, `kernels/smNN/`, `and/or`\n"}],
    diagrams_render: [page_of(DIAGRAM), {"docs/ARCHITECTURE.md": page_of(DIAGRAM)["docs/A.md"] * 2}],
    pictures_render: [{"docs/A.md": "![a](pictures/a.svg)\n", "docs/pictures/a.svg": SVG}],
}


# ---- Spelling.

def misspelt(*arguments):
    names = r"\b\w*[a-z][A-Z]\w*\b"  # whose parts are words: AddressIn
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words", WORDS, "--ignore-regex", names]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True).stdout


def test_words_are_spelt_right(tmp_path):
    """Checks documents, comments, names and messages by codespell; tests/words.txt has ours that it takes for others."""
    pytest.importorskip("codespell_lib", reason="no codespell: ./dev test installs it")
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True,
                           text=True).stdout.split("\n")
    text = [name for name in names if name and os.path.isfile(os.path.join(ROOT, name))
            and not name.startswith(("third_party/", "LICENSE", "tests/words.txt"))
            and not name.endswith((".svg", ".png", ".lock", ".json"))]
    assert len(text) > 500 and not misspelt(*text)
    (tmp_path / "page.md").write_text("It was rec" "ieved.\n")
    assert "==> received" in misspelt(str(tmp_path / "page.md"))


@pytest.fixture(scope="session")
def documents():
    return load_documents()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_documents_keep(rule, documents):
    violations = list(rule(documents))
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_what_is_planted(rule):
    for planted in PLANTED[rule]:
        assert list(rule(planted)), planted


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_lets_the_right_pass(rule):
    for kept in KEPT[rule]:
        assert not list(rule(kept)), kept
