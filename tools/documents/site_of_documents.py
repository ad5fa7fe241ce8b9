"""Builds the site of documents with MkDocs Material, search included: a part of `./dev docs`.

    python3 tools/documents/site_of_documents.py FOLDER [PACKAGES]     (where mkdocs is installed; default: .deps/site)

The pages are the repository's own, laid out as they lie there, with the files that they link to; Graphviz draws their
Mermaid diagrams, so that no browser has to load a program from elsewhere. A link to a heading that is not there ends the
build.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap

import python_reference
import wire_reference

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OWN = os.path.join(ROOT, "tools/documents/mkdocs.yml")


def tracked():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name]


def shown():
    """The documents, what they show, and the files that they link to; of a folder all."""
    files = tracked()
    pages = [name for name in files if re.match(r"(docs/.*|[A-Z]+)\.md$", name)]
    wanted = {name for name in files if name.startswith("docs/pictures/")} | set(pages)
    for page in pages:
        with open(os.path.join(ROOT, page), encoding="utf-8") as file:
            targets = re.findall(r"\]\(([^)#:\s]+)", file.read())
        for target in targets:
            path = os.path.normpath(os.path.join(os.path.dirname(page), target))
            wanted |= {name for name in files if name == path or name.startswith(path + "/")}
    return sorted(wanted)


def generated():
    """Pages that the site alone has: {path: text}."""
    protos = [os.path.join(ROOT, name) for name in tracked() if re.match(r"proto/attnd/v1/\w+\.proto$", name)]
    return {"docs/python_reference.md": python_reference.page(), "docs/wire_reference.md": wire_reference.page(protos)}


def wrapped(label):
    return "\\n".join(textwrap.wrap(label, 20))


def dot_of(diagram):
    """Translates a flowchart of Mermaid, as far as words_test.py knows it, to Graphviz."""
    first, *lines = diagram.strip().split("\n")
    yield f"digraph {{ rankdir={first.split()[1]}; bgcolor=transparent; compound=true;"
    yield 'node [shape=box style=rounded fontname="sans-serif" fontsize=12]; edge [fontname="sans-serif" fontsize=11];'
    for line in map(str.strip, lines):
        node = re.fullmatch(r'(\w+)(?:\["([^"]+)"\]|\[\("([^"]+)"\)\])', line)
        group = re.fullmatch(r'subgraph (\w+)\["([^"]+)"\]', line)
        edge = re.fullmatch(r'(\w+) (<?)-->(?:\|"([^"]+)"\|)? (\w+)', line)
        if node:
            yield f'{node[1]} [label="{wrapped(node[2] or node[3])}"];'
        elif group:
            yield f'subgraph cluster_{group[1]} {{ label="{group[2]}"; fontname="sans-serif"; fontsize=12; style=rounded;'
        elif edge:
            yield f'{edge[1]} -> {edge[4]} [label="{wrapped(edge[3] or "")}" dir={"both" if edge[2] else "forward"}];'
        elif line == "end":
            yield "}"
        elif line:
            raise SystemExit(f"no part of a flowchart: {line}")
    yield "}"


def drawn(text):
    """The page with each Mermaid diagram as an SVG in the colours of the text around it."""
    def svg(match):
        made = subprocess.run(["dot", "-Tsvg"], input="\n".join(dot_of(match[1])), check=True, capture_output=True,
                              text=True).stdout
        made = re.sub(r"<!--.*?-->\n?", "", made[made.index("<svg"):], flags=re.S).replace('"black"', '"currentColor"')
        return f'<div class="diagram">{made.strip()}</div>\n'
    return re.sub(r"^```mermaid\n(.*?)^```\n", svg, text, flags=re.M | re.S)


def build(folder, packages):
    with tempfile.TemporaryDirectory() as work:
        for name in shown():
            os.makedirs(os.path.dirname(os.path.join(work, "pages", name)), exist_ok=True)
            shutil.copyfile(os.path.join(ROOT, name), os.path.join(work, "pages", name))
            if name.endswith(".md"):
                with open(os.path.join(work, "pages", name), "r+", encoding="utf-8") as file:
                    text = drawn(file.read())
                    file.seek(0)
                    file.write(text)
                    file.truncate()
        for name, text in generated().items():
            with open(os.path.join(work, "pages", name), "w", encoding="utf-8") as file:
                file.write(text)
        shutil.copy(OWN, work)
        shutil.copy(os.path.join(os.path.dirname(OWN), "site.css"), os.path.join(work, "pages"))
        subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-f", os.path.join(work, "mkdocs.yml")],
                       check=True, env={**os.environ, "PYTHONPATH": packages, "NO_MKDOCS_2_WARNING": "1"})
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(os.path.join(work, "made"), folder)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    build(os.path.abspath(sys.argv[1]), os.path.abspath((sys.argv[2:] or [os.path.join(ROOT, ".deps/site")])[0]))
