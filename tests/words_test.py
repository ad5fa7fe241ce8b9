"""How the documents are written and whether their pictures render, as far as a machine can tell (pytest).

Each rule is a generator over {path: text} that yields "path: what is wrong". It runs on the documents of this
repository, and on PLANTED below, a violation that it must find.

Sentences: tables, code, headings, pictures and quoted HTML are left out. A paragraph, and an item of a list, is a block.
A block is cut after `.`, `!` or `?` (and closing brackets, quotes or asterisks) before white space, unless an
abbreviation ends there. A word is what stands between spaces and holds a letter or a digit; inline code is one word,
and of a link the text counts. What has fewer than three words, such as a label, is no sentence.
All words of a document, tables and code included, are counted as `wc -w` does.

    /usr/bin/python3 tests/words_test.py      # a line for each document: words, sentences, average, longest
"""
import glob
import os
import posixpath
import re
import xml.etree.ElementTree

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAX_WORDS = 32_000
MAX_AVERAGE = 20
MAX_SENTENCE = 45
MAX_PERFORMANCE_LINES = 250
MAX_DECISION_LINES = 6
MAX_DECISION_WIDTH = 100
FOLDERS = ("base", "net", "attention", "modules", "kernels", "proto", "server", "client", "tools", "tests", "deploy",
           "third_party")
ABBREVIATIONS = ("e.g.", "i.e.", "cf.", "vs.", "etc.")


def load_documents():
    """The documents, and their pictures."""
    names = ["README.md", "SECURITY.md", "CONTRIBUTING.md"]
    for pattern in ("docs/*.md", "docs/pictures/*.svg"):
        names += sorted(glob.glob(pattern, root_dir=ROOT))
    documents = {}
    for name in names:
        with open(os.path.join(ROOT, name), encoding="utf-8") as file:
            documents[name] = file.read()
    return documents


def pages(documents):
    return {name: text for name, text in documents.items() if name.endswith(".md")}


# ---- Sentences.

def prose_lines(text):
    """The lines of prose; "" where a block ends."""
    in_fence, before, in_code = False, "", False
    for line in text.split("\n"):
        is_fence = line.lstrip().startswith("```")
        in_code = line.startswith("    ") and (in_code or not before.strip())
        if is_fence or in_fence or in_code or re.match(r"\s*(\||#+ |<|!\[)", line):
            yield ""
        else:
            yield line
        in_fence ^= is_fence
        before = line


def blocks(text):
    block = []
    for line in [*prose_lines(text), ""]:
        item = re.match(r"\s*(?:[-*]|\d+\.) +(.*)", line)
        if (item or not line.strip()) and block:
            yield " ".join(block)
            block = []
        if line.strip():
            block.append(item.group(1) if item else line.strip())


def words_of(block):
    """The words of a block; white space within inline code and a link's target are gone."""
    block = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", block)
    block = re.sub(r"`[^`]*`", "code", block)
    block = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block)
    return [word for word in block.split() if re.search(r"\w", word)]


def sentences(text):
    for block in blocks(text):
        sentence = []
        for word in [*words_of(block), None]:
            if word is not None:
                sentence.append(word)
            ends = word is None or (re.search(r"[.!?][)\]\"'*_”’]*$", word) and not word.endswith(ABBREVIATIONS))
            if ends:
                if len(sentence) >= 3:
                    yield sentence
                sentence = []


# ---- Rules.

def all_words(documents):
    total = sum(len(text.split()) for text in pages(documents).values())
    if total > MAX_WORDS:
        yield f"all documents: {total} words, limit {MAX_WORDS}"


def average_sentence(documents):
    for name, text in pages(documents).items():
        lengths = [len(sentence) for sentence in sentences(text)]
        if lengths and sum(lengths) / len(lengths) > MAX_AVERAGE:
            yield f"{name}: {sum(lengths) / len(lengths):.1f} words a sentence, limit {MAX_AVERAGE}"


def longest_sentence(documents):
    for name, text in pages(documents).items():
        for sentence in sentences(text):
            if len(sentence) > MAX_SENTENCE:
                yield f"{name}: a sentence of {len(sentence)} words, limit {MAX_SENTENCE}: {' '.join(sentence)}"


def length_of_performance(documents):
    lines = documents.get("docs/PERFORMANCE.md", "").count("\n")
    if lines > MAX_PERFORMANCE_LINES:
        yield f"docs/PERFORMANCE.md: {lines} lines, limit {MAX_PERFORMANCE_LINES}"


def decisions(documents):
    """(title, lines) of each decision: a heading of the third level in ARCHITECTURE's section Decisions."""
    section = re.search(r"^## Decisions\n(.*?)(?=^## |\Z)", documents.get("docs/ARCHITECTURE.md", ""), re.M | re.S)
    for part in re.split(r"^### ", section.group(1) if section else "", flags=re.M)[1:]:
        title, *lines = part.split("\n")
        yield title, [line for line in lines if line.strip()]


def short_decisions(documents):
    """Each states context, decision and consequence, in at most six lines that are no wider than a page."""
    if "docs/ARCHITECTURE.md" in documents and not list(decisions(documents)):
        yield "docs/ARCHITECTURE.md: no decisions"
    for title, lines in decisions(documents):
        if len(lines) > MAX_DECISION_LINES:
            yield f"docs/ARCHITECTURE.md: {title}: {len(lines)} lines, limit {MAX_DECISION_LINES}"
        for line in lines:
            if len(line) > MAX_DECISION_WIDTH:
                yield f"docs/ARCHITECTURE.md: {title}: {len(line)} characters, limit {MAX_DECISION_WIDTH}: {line}"
        for part in ("- Context: ", "- Decision: ", "- Consequence: "):
            if not any(line.startswith(part) for line in lines):
                yield f"docs/ARCHITECTURE.md: {title}: no line that begins with {part}"


def figures_are_current(documents):
    """Each quantity in README's table of figures stands in PERFORMANCE.md too."""
    table = re.search(r"^\| figure .*\n\|[-|]+\n((?:\|.*\n)+)", documents.get("README.md", ""), re.M)
    if "README.md" in documents and not table:
        yield "README.md: no table of figures"
    for row in table.group(1).splitlines() if table else []:
        for quantity in re.findall(r"\d[\d.]*(?: / \d[\d.]*)?", row.split("|")[2]):
            if not re.search(rf"(?<![\d.]){re.escape(quantity)}(?![\d.])", documents.get("docs/PERFORMANCE.md", "")):
                yield f"README.md: {quantity} is not in docs/PERFORMANCE.md: {row}"


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


RULES = [all_words, average_sentence, longest_sentence, length_of_performance, short_decisions,
         figures_are_current, paths_exist, diagrams_render, pictures_render]

DECISION = "## Decisions\n\n### Raw\n- Context: a.\n- Decision: b.\n- Consequence: c.\n"
FIGURES = "| figure | |\n|---|---|\n| a | 1.5 times; 65 / 320 µs |\n"
DIAGRAM = 'flowchart LR\n  subgraph S["s"]\n    A["a: b/c"]\n  end\n  B[("b")]\n  A --> B\n  B -->|"to"| A\n'
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" viewBox="0 0 9 9"><text>a</text></svg>'


def page_of(diagram):
    return {"docs/A.md": f"# A\n\n```mermaid\n{diagram}```\n"}


PLANTED = {
    all_words: [{"README.md": "word " * 20_000, "docs/A.md": "| word " * 6_001}],
    average_sentence: [{"README.md": "# Title\n\n" + "word " * 21 + "end.\n\n- " + "word " * 20 + "end!\n"},
                       {"docs/A.md": "Yes.\n\n" + "word " * 20 + "[a link](http://x.y/z) and `inline code. here`.\n"}],
    longest_sentence: [{"README.md": "Short ones are fine.\n" * 9 + "Now comes " + "word " * 44 + "end.\n"},
                       {"docs/A.md": "- " + "word, e.g. one; " * 16 + "end\n- next\n"}],
    length_of_performance: [{"docs/PERFORMANCE.md": "\n" * 251}],
    short_decisions: [{"docs/ARCHITECTURE.md": DECISION + "more\n" * 4},
                      {"docs/ARCHITECTURE.md": DECISION + "x" * 101 + "\n"},
                      {"docs/ARCHITECTURE.md": DECISION.replace("- Consequence: ", "- ")},
                      {"docs/ARCHITECTURE.md": "# Architecture\n"}],
    figures_are_current: [{"README.md": FIGURES, "docs/PERFORMANCE.md": "1.5, 65 / 32"},
                          {"README.md": FIGURES, "docs/PERFORMANCE.md": "11.5, 65 / 320"}, {"README.md": "# A\n"}],
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
# What the same rules let pass: limits reached, and what is no sentence.
KEPT = {
    all_words: [{"README.md": "word " * MAX_WORDS}],
    average_sentence: [{"README.md": "| " + "word " * 30 + "|\n\n    " + "code " * 30 + "\n"},
                       {"README.md": "```\n" + "word " * 30 + "\n```\n# " + "word " * 30 + "\n"},
                       {"README.md": "word " * 19 + "end. " + "word " * 19 + "(end.)\n"}],
    longest_sentence: [{"README.md": "word " * 44 + "end.\n" + "word " * 44 + "end.\n"},
                       {"README.md": "Run `" + "a " * 60 + "`, then look.\n"}],
    length_of_performance: [{"docs/PERFORMANCE.md": "\n" * 250}],
    short_decisions: [{"docs/ARCHITECTURE.md": DECISION + "more\n" * 3 + "\n## Next\n" + "more\n" * 9}],
    figures_are_current: [{"README.md": FIGURES, "docs/PERFORMANCE.md": "| 1.5 / 2 | 65 / 320 |"}],
    paths_exist: [{"docs/A.md": "`tests/words_test.py`, `tests/`, `kernels/smNN/`, `and/or`\n"}],
    diagrams_render: [page_of(DIAGRAM), {"docs/ARCHITECTURE.md": page_of(DIAGRAM)["docs/A.md"] * 2}],
    pictures_render: [{"docs/A.md": "![a](pictures/a.svg)\n", "docs/pictures/a.svg": SVG}],
}


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
def test_rule_lets_the_limit_pass(rule):
    for kept in KEPT[rule]:
        assert not list(rule(kept)), kept


def main():
    total = 0
    for name, text in pages(load_documents()).items():
        lengths = [len(sentence) for sentence in sentences(text)] or [0]
        total += len(text.split())
        average = sum(lengths) / len(lengths)
        print(f"{name:24} {len(text.split()):6} words {len(lengths):4} sentences, average {average:5.1f},"
              f" longest {max(lengths)}")
    print(f"{'together':24} {total:6} words, limit {MAX_WORDS}")


if __name__ == "__main__":
    main()
