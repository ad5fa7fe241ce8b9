"""Counts what `./dev test` ran and prints the closing line, "N passed, N failed".

Reads FOLDER/bazel.json (Bazel's build events, which name each test.xml of this run and no older one), FOLDER/pytest.xml
and FOLDER/frameworks.xml, whichever exist. Exits non-zero when anything failed, STATUS is not 0, or nothing ran.

    python3 tests/summary.py FOLDER STATUS
"""
import collections
import json
import os
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree


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


def main(folder, status):
    counts, failed = collections.Counter(), []
    for name, count in (("bazel.json", count_bazel), ("pytest.xml", count_cases), ("frameworks.xml", count_cases)):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            more, names = count(path)
            counts += more
            failed += names
    if status != 0 and not counts["failed"]:
        counts["failed"] += 1
        failed.append(f"a build or test command ended with status {status}")
    for name in failed:
        print(f"FAILED {name}")
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    print(f"{counts['passed']} passed, {counts['failed']} failed{skipped}")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
