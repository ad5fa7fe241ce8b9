"""Says where the time of `./dev test` went: ./dev test --slowest [N].

Reads in each FOLDER what the run left there: build.profile.gz and test.profile.gz (Bazel's profiles, a line of time for each
action), bazel.json (its build events) and the JUnit files of pytest. Seconds are those of the clock on the wall while an
action or a case ran; an action's wait for a free core is left out.

    python3 tests/slowest.py N FOLDER...
"""
import collections
import glob
import gzip
import json
import os
import sys
import xml.etree.ElementTree as ElementTree

from summary import PYTEST_FILES, read_bazel_events

# Bazel's description of an action begins so; the first that fits counts.
KINDS = [("kernels", "Executing genrule //kernels/cuda/library:cubins_"), ("compile", "Compiling "), ("link", "Linking "),
         ("test", "Testing ")]


def read_actions(path):
    """Counter of seconds by action in one profile; actions that were cached take none."""
    seconds = collections.Counter()
    with gzip.open(path) as file:
        for event in json.load(file)["traceEvents"]:
            sign = {"action processing": 1, "action resource lock": -1}.get(event.get("cat"), 0)
            if sign and event["name"]:
                seconds[event["name"]] += sign * event.get("dur", 0) / 1e6
    return seconds


def read_cases(path, place):
    """(seconds, name) of each case in a JUnit file; `place` is the target, or nothing where the case names its file."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        where = place or case.get("classname").replace(".", "/") + ".py"
        name = case.get("name") if not place else f"{case.get('classname')}.{case.get('name')}"
        yield float(case.get("time") or 0), where, name


def read_all(folder):
    """Seconds by action, seconds by test target or file, and (seconds, target or file, case)."""
    actions, places, cases = collections.Counter(), collections.Counter(), []
    for path in glob.glob(os.path.join(folder, "*.profile.gz")):
        actions.update(read_actions(path))
    events = os.path.join(folder, "bazel.json")
    for target, files in (read_bazel_events(events)[0] if os.path.exists(events) else {}).items():
        cases += [case for path in filter(os.path.exists, files) for case in read_cases(path, target)]
    for name in PYTEST_FILES:
        path = os.path.join(folder, name)
        cases += read_cases(path, "") if os.path.exists(path) else []
    for seconds, place, _ in cases:
        places[place] += seconds
    return actions, places, cases


def kind_of(action):
    return next((kind for kind, start in KINDS if action.startswith(start)), "other")


def main(count, folders):
    actions, places, cases = collections.Counter(), collections.Counter(), []
    for folder in folders:
        more = read_all(folder)
        actions.update(more[0])
        places.update(more[1])
        cases += more[2]
    kinds = collections.Counter()
    for action, seconds in actions.items():
        kinds[kind_of(action)] += seconds
    python = sum(seconds for place, seconds in places.items() if place.endswith(".py"))
    print("Minutes: " + ", ".join(f"{kind} {seconds / 60:.1f}" for kind, seconds in kinds.most_common())
          + f", pytest {python / 60:.1f}")
    builds = {action: seconds for action, seconds in actions.items() if kind_of(action) != "test"}
    for title, found in (("Actions of the build", builds), ("Test targets and files", places),
                         ("Cases", {f"{place} {name}": seconds for seconds, place, name in cases})):
        print(f"\n{title}:")
        for name, seconds in collections.Counter(found).most_common(count):
            print(f"{seconds:8.1f} s  {name}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
