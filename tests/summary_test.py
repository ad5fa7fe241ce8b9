"""What tests/summary.py counts, on files made here."""
import json
import os
import subprocess
import sys

SUMMARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "summary.py")
XML = """<testsuites><testsuite name="A">
<testcase name="p" classname="A" status="run"/><testcase name="d" classname="A" status="notrun"/>
<testcase name="s" classname="A" status="run"><skipped/></testcase>%s</testsuite></testsuites>"""
FAILED_CASE = '<testcase name="f" classname="A" status="run"><failure message="no"/></testcase>'


def summarise(folder, status=0):
    done = subprocess.run([sys.executable, SUMMARY, str(folder), str(status)], capture_output=True, text=True)
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
    assert summarise(tmp_path, 3) == ("1 passed, 1 failed, 1 skipped", 1)


def test_a_target_without_a_report_counts_as_one_failure(tmp_path):
    write_events(tmp_path, {"//a": ("PASSED", XML % ""), "//b": ("FAILED_TO_BUILD", None), "//c": ("TIMEOUT", None)})
    assert summarise(tmp_path, 1) == ("1 passed, 2 failed, 1 skipped", 1)


def test_fails_when_the_build_fails_before_any_test(tmp_path):
    assert summarise(tmp_path, 1) == ("0 passed, 1 failed", 1)


def test_fails_when_nothing_ran(tmp_path):
    assert summarise(tmp_path) == ("0 passed, 0 failed", 1)
