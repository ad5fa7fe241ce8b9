"""tests/summary.py, slowest.py and line_coverage.py on files made here."""
import gzip
import json
import os
import subprocess
import sys

SUMMARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "summary.py")
XML = """<testsuites><testsuite name="A">
<testcase name="p" classname="A" status="run"/><testcase name="d" classname="A" status="notrun"/>
<testcase name="s" classname="A" status="run"><skipped/></testcase>%s</testsuite></testsuites>"""
FAILED_CASE = '<testcase name="f" classname="A" status="run"><failure message="no"/></testcase>'


def summarise(*folders, status=0):
    (folders[0] / "status").write_text(f"{status}\n")
    done = subprocess.run([sys.executable, SUMMARY, *map(str, folders)], capture_output=True, text=True)
    return done.stdout.splitlines()[-1], done.returncode


def write_events(folder, targets):
    """targets: {label: (overall status, test.xml's text or None)}"""
    with open(folder / "bazel.json", "w") as events:
        for label, (status, xml) in targets.items():
            path = folder / f"{label[2:]}.xml"
            if xml is not None:
                path.write_text(xml)
                outputs = [{"name": "test.xml", "uri": f"file://{path}"}]
                events.write(json.dumps({"id": {"testResult": {"label": label}},
                                         "testResult": {"testActionOutput": outputs}}) + "\n")
            events.write(json.dumps({"id": {"testSummary": {"label": label}},
                                     "testSummary": {"overallStatus": status}}) + "\n")


def test_counts_cases_of_each_run(tmp_path):
    write_events(tmp_path, {"//a": ("PASSED", XML % "")})
    (tmp_path / "pytest.xml").write_text(XML % "")
    assert summarise(tmp_path) == ("2 passed, 0 failed, 2 skipped", 0)
    (tmp_path / "frameworks.xml").write_text(XML % FAILED_CASE)
    assert summarise(tmp_path) == ("3 passed, 1 failed, 3 skipped", 1)


def test_fails_when_a_case_fails(tmp_path):
    write_events(tmp_path, {"//a": ("FAILED", XML % FAILED_CASE)})
    assert summarise(tmp_path, status=3) == ("1 passed, 1 failed, 1 skipped", 1)


def test_a_target_without_a_report_counts_as_one_failure(tmp_path):
    write_events(tmp_path, {"//a": ("PASSED", XML % ""), "//b": ("FAILED_TO_BUILD", None), "//c": ("TIMEOUT", None)})
    assert summarise(tmp_path, status=1) == ("1 passed, 2 failed, 1 skipped", 1)


def test_fails_when_the_build_fails_before_any_test(tmp_path):
    assert summarise(tmp_path, status=1) == ("0 passed, 1 failed", 1)


def test_fails_when_nothing_ran(tmp_path):
    assert summarise(tmp_path) == ("0 passed, 0 failed", 1)


def test_two_runs_are_counted_together_and_one_that_broke_off_has_failed(tmp_path):
    first, second = tmp_path / "test", tmp_path / "rest"
    for folder in (first, second):
        folder.mkdir()
        (folder / "pytest.xml").write_text(XML % "")
    assert summarise(first, second) == ("2 passed, 1 failed, 2 skipped", 1)  # the second has no status
    (second / "status").write_text("0\n")
    assert summarise(first, second) == ("2 passed, 0 failed, 2 skipped", 0)


def test_what_was_not_run_is_named_before_the_last_line(tmp_path):
    (tmp_path / "pytest.xml").write_text(XML % "")
    (tmp_path / "not_run").write_text("C++: //a:links_test\nhaproxy: t.py::a\nhaproxy: t.py::b\n")
    (tmp_path / "status").write_text("0\n")
    lines = subprocess.run([sys.executable, SUMMARY, str(tmp_path)], capture_output=True, text=True).stdout.splitlines()
    assert lines == ["3 not run, ./dev test --all runs them: C++, haproxy (2)", "1 passed, 0 failed, 1 skipped"]


def test_slowest_lists_actions_without_their_waits_and_targets_and_cases(tmp_path):
    timed = '<testsuites><testsuite><testcase name="p" classname="A" status="run" time="2.5"/></testsuite></testsuites>'
    write_events(tmp_path, {"//a": ("PASSED", timed)})
    (tmp_path / "pytest.xml").write_text(timed.replace('"A"', '"tests.python.test_b"').replace("2.5", "61"))
    events = [{"cat": "action processing", "name": name, "dur": seconds * 1e6}
              for name, seconds in (("Compiling a.cc", 60), ("Testing //a", 3), ("Linking a", 6),
                                    ("Executing genrule //kernels/cuda/library:cubins_70_rest_0", 12))]
    events.append({"cat": "action resource lock", "name": "Compiling a.cc", "dur": 30e6})
    with gzip.open(tmp_path / "test.profile.gz", "wt") as profile:
        json.dump({"traceEvents": events}, profile)
    done = subprocess.run([sys.executable, SUMMARY.replace("summary", "slowest"), "1", str(tmp_path)], capture_output=True,
                          text=True)
    assert done.stdout.splitlines() == [
        "Minutes: compile 0.5, kernels 0.2, link 0.1, test 0.1, pytest 1.0", "",
        "Actions of the build:", "    30.0 s  Compiling a.cc", "",
        "Test targets and files:", "    61.0 s  tests/python/test_b.py", "",
        "Cases:", "    61.0 s  tests/python/test_b.py p"], done.stderr


def test_coverage_counts_a_line_of_several_tests_once_and_the_product_alone(tmp_path):
    files = {"a": "SF:base/a.cc\nDA:1,0\nDA:2,5\nDA:3,0\nend_of_record\nSF:tests/fake.cc\nDA:1,1\nend_of_record\n",
             "b": "SF:base/a.cc\nDA:1,2\nDA:2,0\nend_of_record\nSF:net/b.cc\nDA:9,1\nend_of_record\n"}
    with open(tmp_path / "bazel.json", "w") as events:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            outputs = [{"name": "test.lcov", "uri": f"file://{tmp_path / name}"}]
            events.write(json.dumps({"id": {}, "testResult": {"testActionOutput": outputs}}) + "\n")
    done = subprocess.run([sys.executable, SUMMARY.replace("summary", "line_coverage"), str(tmp_path / "bazel.json")],
                          capture_output=True, text=True)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["66.7", "%", "2", "of", "3", "lines", "base"], ["100.0", "%", "1", "of", "1", "lines", "net"],
        ["75.0", "%", "3", "of", "4", "lines", "all"]], done.stderr
