"""pytest's part of `./dev test`: which tests run, and a line of progress every 30 seconds. `./dev` loads it by -p.

A test that takes minutes and guards a rare edit carries @pytest.mark.rare("group"), where the group is what `./dev test`
names as not run.
"""
import os
import threading
import time
import xml.etree.ElementTree

import pytest

PERIOD_SECONDS = 30

# Two tests run at a time, of small tensors: more threads of PyTorch's and NumPy's would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--skipped-in", metavar="FILE", help="run the tests alone that this JUnit file says were skipped")
    parser.addoption("--rare", choices=["with", "without", "only"], default="with", help="whether rare tests run")
    parser.addoption("--not-run", metavar="FILE", help="append a line \"group: test\" for each rare test that does not run")


def pytest_configure(config):
    config.addinivalue_line("markers", "rare(group): takes minutes and guards a rare edit; ./dev test --all runs it")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "progress")


def pytest_collection_modifyitems(config, items):
    report, rare = config.getoption("skipped_in"), config.getoption("rare")
    if report:
        select_skipped(config, items, report)
    if rare != "with":
        left_out = [item for item in items if bool(item.get_closest_marker("rare")) == (rare == "without")]
        deselect(config, items, left_out)
        if rare == "without":
            note_not_run(config, left_out)


def select_skipped(config, items, report):
    """A file that was skipped as a whole stands in the report without its tests' names."""
    cases = xml.etree.ElementTree.parse(report).getroot().iter("testcase")
    skipped = {(case.get("classname"), case.get("name")) for case in cases if case.find("skipped") is not None}
    modules = {name.rpartition(".")[2] for place, name in skipped if not place}

    def chosen(item):
        module = item.module.__name__
        return module in modules or any(place.rpartition(".")[2] == module and name == item.name
                                        for place, name in skipped)
    deselect(config, items, [item for item in items if not chosen(item)])


def deselect(config, items, left_out):
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def note_not_run(config, left_out):
    """The first of pytest's processes writes; all collect the same."""
    if config.getoption("not_run") and getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        with open(config.getoption("not_run"), "a") as file:
            for item in left_out:
                file.write(f"{item.get_closest_marker('rare').args[0]}: {item.nodeid}\n")


class Progress:
    """Counts the tests that have ended, in the process that the others report to."""

    def __init__(self, config):
        self._config = config
        self._total, self._done, self._running = 0, 0, {}
        self._ended, self._lock = threading.Event(), threading.Lock()

    def pytest_sessionstart(self):
        self._start = time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()

    def pytest_sessionfinish(self):
        self._ended.set()

    def pytest_collection_finish(self, session):
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self._total = len(ids)

    def pytest_runtest_logstart(self, nodeid):
        with self._lock:
            self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        with self._lock:
            self._running.pop(nodeid, None)
            self._done += 1

    def line(self):
        now = time.monotonic()
        with self._lock:
            running = [f"{name} ({now - since:.0f} s)" for name, since in self._running.items()]
        return f"[{self._done} / {self._total}] pytest, {now - self._start:.0f} s; at work: {', '.join(running) or 'none'}"

    def _run(self):
        while not self._ended.wait(PERIOD_SECONDS):
            reporter = self._config.pluginmanager.getplugin("terminalreporter")
            reporter.write(f"\n{self.line()}\n")
            reporter.flush()
