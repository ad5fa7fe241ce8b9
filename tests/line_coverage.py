"""Prints which share of the product's C++ lines the tests reach, by folder: ./dev coverage.

Reads Bazel's build events, which name each test's lcov file. A line that several tests compile counts once.

    python3 tests/line_coverage.py bazel.json
"""
import collections
import json
import os
import re
import sys
import urllib.parse

NOT_PRODUCT = re.compile(r"(tests|tools|third_party)/|.*_(test|benchmark|fuzzer)\.cc$|.*\.pb\.(cc|h)$")


def lcov_files(events):
    with open(events) as lines:
        for event in map(json.loads, lines):
            for output in event.get("testResult", {}).get("testActionOutput", []):
                if output["name"] == "test.lcov":
                    yield urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)


def add_lines(path, reached):
    """Into {source file: {line: times}} what one lcov file counts."""
    with open(path) as lines:
        for line in lines:
            key, _, value = line.strip().partition(":")
            if key == "SF":
                source = reached[value]
            elif key == "DA":
                number, count = value.split(",")[:2]
                source[int(number)] += int(count)


def main(events):
    reached = collections.defaultdict(collections.Counter)
    for path in filter(os.path.exists, lcov_files(events)):
        add_lines(path, reached)
    folders = collections.defaultdict(lambda: [0, 0])
    for source, lines in reached.items():
        if not NOT_PRODUCT.match(source):
            for name in (os.path.dirname(source), "all"):
                folders[name][0] += sum(count > 0 for count in lines.values())
                folders[name][1] += len(lines)
    for name, (hit, of) in sorted(folders.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{100 * hit / of:6.1f} %  {hit:6} of {of:6} lines  {name}")
    return 0 if folders else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
