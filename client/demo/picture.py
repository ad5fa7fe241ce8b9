"""Draws a terminal with what the demo prints, each part's first and last lines:

    client/demo/demo.sh | client/demo/picture.py docs/pictures/demo.svg
"""
import re
import sys
import xml.sax.saxutils

WIDTH, LINES = 96, 9  # columns; lines of a part
CHARACTER, LINE, MARGIN, SIZE = 8.4, 18, 16, 14  # pixels
BACKGROUND, PLAIN, DIM, HEADING, GOOD = "#16181d", "#d5d9e0", "#8a919e", "#6cb6ff", "#4ec96f"
SAYS_GOOD = re.compile(r"\b(ok|it fell|the curves agree|SERVING|status 0)$")


def parts(text):
    """[[heading, line, ...]]: without empty lines and the build's commit."""
    lines = [re.sub(r" \([0-9a-f]{12}(-dirty)?\)", "", line.rstrip()) for line in text.splitlines()]
    found = [["$ ./dev demo"]]
    for line in filter(None, lines):
        if line.startswith("=== "):
            found.append([])
        found[-1].append(line)
    return found


def shortened(part):
    part = [line if len(line) <= WIDTH else line[:WIDTH - 1] + "…" for line in part]
    if len(part) <= LINES + 1:
        return part
    last = 4 if part[0].startswith("=== Training") else 3
    return part[:LINES - last] + ["⋮"] + part[-last:]


def colour(line):
    if line.startswith("=== "):
        return f'fill="{HEADING}" font-weight="bold"'
    if line.startswith(("$", "⋮")):
        return f'fill="{DIM}"'
    return f'fill="{GOOD if SAYS_GOOD.search(line) else PLAIN}"'


def draw(text):
    lines = []
    for number, part in enumerate(parts(text)):
        lines += ([""] if number else []) + shortened(part)
    width, height = round(2 * MARGIN + WIDTH * CHARACTER), 2 * MARGIN + LINE * len(lines)
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           'role="img" aria-label="./dev demo in a terminal">')
    yield f'  <rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>'
    yield f'  <g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{SIZE}" xml:space="preserve">'
    for number, line in enumerate(lines):
        if line:
            shown = xml.sax.saxutils.escape(line).replace(" ", "\u00a0")  # runs of blanks, in any viewer
            yield (f'    <text x="{MARGIN}" y="{MARGIN + LINE * (number + 1) - 5}" '
                   f'textLength="{len(line) * CHARACTER:.1f}" {colour(line)}>{shown}</text>')
    yield "  </g>\n</svg>"


if len(sys.argv) != 2:
    sys.exit(__doc__)
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.write("\n".join(draw(sys.stdin.read())) + "\n")
