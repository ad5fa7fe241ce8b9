"""Writes docs/figures/*.md from tools/benchmarks/results/figures/*.json: a part of `./dev docs`.

    python3 tools/documents/figures.py

A page is a subject, a table one question; a cell has one number, and each peer a column of its own. Command, machine and
date stand once above each table. Bold numbers are losses: a peer is faster, or an aim is missed.
"""
import glob
import json
import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCES, PAGES = os.path.join(ROOT, "tools/benchmarks/results/figures"), os.path.join(ROOT, "docs/figures")


def table(of):
    yield f"## {of['question']}"
    yield of["about"]
    if of["command"]:
        yield "\n".join(["```text", *of["command"], "```"])
    yield "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
                    for cells in (of["columns"], ["---"] * len(of["columns"]), *of["rows"]))
    if of["note"]:
        yield of["note"]


def page(source):
    parts = [f"# {source['title']}", source["intro"]]
    for of in source["tables"]:
        parts.extend(table(of))
    return "\n\n".join(parts) + "\n"


def pages():
    """{name: text}"""
    made = {}
    for path in sorted(glob.glob(os.path.join(SOURCES, "*.json"))):
        with open(path, encoding="utf-8") as file:
            made[os.path.basename(path)[:-len(".json")]] = page(json.load(file))
    return made


def main():
    for name, text in pages().items():
        with open(os.path.join(PAGES, name + ".md"), "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
