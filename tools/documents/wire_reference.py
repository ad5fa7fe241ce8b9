"""The reference of the wire's interface, from the comments of the .proto files: a page of the site that `./dev docs` builds.

A service becomes a table of its calls, a message one of its fields, an enum one of its values; the comment above each is its
text. Of proto's grammar this reads what these files use, and ends with an error at any other line.
"""
import os
import re

FIELD = re.compile(r"(?:(optional|repeated) )?([\w.]+(?:<[\w., ]+>)?) (\w+) = (\d+)(?: \[[^]]*\])?;")
CALL = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);")
VALUE = re.compile(r"(\w+) = (\d+);")
BLOCK = re.compile(r"(service|message|enum|oneof) (\w+) \{")
STATEMENT = re.compile(r'(?!\s)(?:"[^"]*"|[^{};"])+[{;]|\}')
SKIPPED = re.compile(r"(syntax|package|import|option|reserved)\b.*;")
COLUMNS = {"service": ("call", "request", "reply", "meaning"), "message": ("field", "type", "number", "meaning"),
           "enum": ("value", "number", "meaning")}


class Block:
    """A service, message or enum: its comment and the rows of its table."""

    def __init__(self, kind, name, comment):
        self.kind, self.name, self.comment, self.rows = kind, name, comment, []

    def text(self):
        yield f"### {self.kind} `{self.name}`"
        if self.comment:
            yield prose(self.comment)
        if self.rows:
            lines = [COLUMNS[self.kind], ["---"] * len(COLUMNS[self.kind]), *self.rows]
            yield "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def prose(lines):
    """A comment's lines as Markdown: paragraphs, and what is indented as it stands."""
    parts, before = [], None
    for line in lines:
        kind = "blank" if not line.strip() else "code" if line.startswith("    ") else "words"
        if kind != before and kind != "blank":
            parts.append((kind, []))
        if kind != "blank":
            parts[-1][1].append(line)
        before = kind
    return "\n\n".join("```text\n" + "\n".join(lines) + "\n```" if kind == "code" else "\n".join(map(escaped, lines))
                       for kind, lines in parts)


def escaped(text):
    """With backslashes where Markdown or HTML would read a sign, but in code."""
    return re.sub(r"`[^`]*`|[<*_\[\]]", lambda found: found[0] if found[0][0] == "`" else "\\" + found[0], text)


def cell(*comments):
    return " ".join(escaped(line.strip()) for comment in comments for line in comment if line).replace("|", "\\|")


class Reader:
    """Reads one file, statement by statement."""

    def __init__(self):
        self.blocks, self.open, self.choices, self.comment = [], [], [], []

    def read(self, code, trailing):
        block, call, field, value = (pattern.fullmatch(code) for pattern in (BLOCK, CALL, FIELD, VALUE))
        meaning = [*self.comment, *([trailing] if trailing else [])]
        if block:
            self.enter(*block.groups(), meaning)
        elif code == "}":
            if self.open.pop() is None:
                self.choices.pop()
        elif call:
            name, sends, request, answers, reply = call.groups()
            self.row(f"`{name}`", f"{sends or ''}`{request}`", f"{answers or ''}`{reply}`", cell(meaning))
        elif field:
            label, kind, name, number = field.groups()
            choice = [f"One of `{self.choices[-1]}`."] if self.choices else []
            self.row(f"`{name}`", " ".join(filter(None, [label, f"`{kind}`"])), number, cell(choice, meaning))
        elif value:
            self.row(f"`{value[1]}`", value[2], cell(meaning))
        elif not SKIPPED.fullmatch(code):
            raise SystemExit(f"wire_reference.py: cannot read: {code}")

    def enter(self, kind, name, comment):
        if kind == "oneof":
            self.choices.append(name)
            self.open.append(None)
            return
        outer = [block.name for block in self.open if block]
        self.blocks.append(Block(kind, ".".join([*outer, name]), comment))
        self.open.append(self.blocks[-1])

    def row(self, *cells):
        [block for block in self.open if block][-1].rows.append(cells)

    def file(self, text):
        head, text = re.match(r"((?://[^\n]*\n)*)(.*)", text, re.S).groups()
        for line in text.split("\n"):
            code, _, trailing = (part.strip() for part in line.partition("//"))
            for statement in STATEMENT.findall(code):
                self.read(statement, trailing)
            if code or not line.strip():
                self.comment = []
            else:
                self.comment.append(line.strip()[2:].removeprefix(" "))
        return prose([line[2:].removeprefix(" ") for line in head.splitlines()])


def page(paths):
    parts = ["# The wire's interface",
             "Each field says its unit, range, default, and the error if it is violated. The files are in `proto/attnd/v1`."]
    for path in paths:
        with open(path, encoding="utf-8") as file:
            reader = Reader()
            head = reader.file(file.read())
        parts += [f"## {os.path.basename(path)}", head]
        for block in reader.blocks:
            parts.extend(block.text())
    return "\n\n".join(filter(None, parts)) + "\n"
