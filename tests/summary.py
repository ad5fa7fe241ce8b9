"""Counts what `./dev test` ran and prints the closing line, "N passed, N failed".

Reads in each FOLDER bazel.json (Bazel's build events, which name each test.xml of this run and no older one), pytest.xml
and frameworks.xml, whichever exist; `status`, how the commands ended; and `not_run`, a line "group: test" for each test that
the run left out. Exits non-zero when anything failed, a status is not 0, or nothing ran.

    python3 tests/summary.py FOLDER...
"""
import collections
import json
import os
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree

PYTEST_FILES = ("pytest.xml", "frameworks.xml")


def count_cases(path):
    """Counter of passed, failed, skipped, and the failed cases' names, in one JUnit file."""
    counts, failed = collections.Counter(), []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            counts["skipped"] += 1
        elif case.get("status") != "notrun":
            counts["passed"] += 1
    return counts, failed


def read_bazel_events(path):
    """Two maps by target: its test.xml files, and its overall status."""
    files, status = collections.defaultdict(list), {}
    with open(path) as lines:
        for line in lines:
            event = json.loads(line)
            if "testResult" in event:
                outputs = event["testResult"].get("testActionOutput", [])
                files[event["id"]["testResult"]["label"]] += [
                    urllib.parse.unquote(urllib.parse.urlparse(o["uri"]).path)
                    for o in outputs if o["name"] == "test.xml"]
            elif "testSummary" in event:
                status[event["id"]["testSummary"]["label"]] = event["testSummary"]["overallStatus"]
            elif "targetCompleted" in event["id"] and not event.get("completed", {}).get("success"):
                status.setdefault(event["id"]["targetCompleted"]["label"], "FAILED_TO_BUILD")
    return files, status


def count_bazel(path):
    counts, failed = collections.Counter(), []
    files, status = read_bazel_events(path)
    for target, outcome in sorted(status.items()):
        found = collections.Counter()
        for xml in filter(os.path.exists, files[target]):
            in_file, names = count_cases(xml)
            found += in_file
            failed += [f"{target} {name}" for name in names]
        if outcome not in ("PASSED", "FLAKY") and not found["failed"]:
            found["failed"] += 1
            failed.append(f"{target} {outcome}")
        counts += found
    return counts, failed


def count_folder(folder):
    """As count_cases, of one run of `./dev test`."""
    counts, failed = collections.Counter(), []
    for name in ("bazel.json", *PYTEST_FILES):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            more, names = (count_bazel if name == "bazel.json" else count_cases)(path)
            counts += more
            failed += names
    status = read_lines(folder, "status")
    if status != ["0"] and not counts["failed"]:
        counts["failed"] += 1
        failed.append(f"a build or test command ended with status {' '.join(status) or 'unknown'}")
    return counts, failed


def read_lines(folder, name):
    path = os.path.join(folder, name)
    return open(path).read().splitlines() if os.path.exists(path) else []


def print_not_run(folders):
    """Names what `not_run` lists, by group; a later folder may have run what an earlier one left out."""
    groups = collections.Counter(line.partition(": ")[0] for line in read_lines(folders[-1], "not_run"))
    if groups:
        named = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(groups.items()))
        print(f"{sum(groups.values())} not run, ./dev test --all runs them: {named}")


def main(folders):
    counts, failed = collections.Counter(), []
    for folder in folders:
        more, names = count_folder(folder)
        counts += more
        failed += names
    for name in failed:
        print(f"FAILED {name}")
    print_not_run(folders)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    print(f"{counts['passed']} passed, {counts['failed']} failed{skipped}")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
