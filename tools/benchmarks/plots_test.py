"""./dev plots: four pictures, from figures that stand in docs/PERFORMANCE.md where they say so."""
import os
import re
import sys
import xml.etree.ElementTree

import pytest

pytest.importorskip("matplotlib", reason="no matplotlib: apt-get install python3-matplotlib")
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
import plots  # noqa: E402


def performance():
    with open(os.path.join(ROOT, "docs/PERFORMANCE.md")) as file:
        return file.read()


def test_draws_what_the_documents_show(tmp_path):
    plots.main(str(tmp_path))
    assert {name + ".svg" for name in plots.PLOTS} == set(os.listdir(tmp_path))
    for name in plots.PLOTS:
        text = (tmp_path / f"{name}.svg").read_text()
        kept = open(os.path.join(ROOT, "docs/pictures", name + ".svg")).read()
        words = [re.findall(r">([^<>\n]+)</text>", picture) for picture in (text, kept)]
        assert words[0] == words[1], f"{name}: run ./dev plots"
        assert xml.etree.ElementTree.fromstring(kept).tag.endswith("svg") and f"pictures/{name}.svg" in performance()


def cpu_rows(page):
    """{"512, 64": [forward, backward, causal forward, causal backward of three machines]}"""
    rows = page.partition("| float32: N, D |")[2].partition("GFLOP/s of attnd")[0]
    rows = re.findall(r"^\| (\d+, \d+) \|(.*)\|$", rows, re.M)
    return {shape: [float(x) for x in re.findall(r"\d+\.\d+", cells)] for shape, cells in rows}


def test_figures_are_those_of_performance():
    machines = plots.result("cpu_against_pytorch")["machines"]
    drawn = {shape: sum((machines[name][shape] for name in machines), []) for shape in machines["Zen 4"]}
    assert drawn == cpu_rows(performance())
    assert drawn != cpu_rows(performance().replace("2.56 / 1.58", "2.57 / 1.58"))
    for kernel in plots.result("kernels")["kernels"]:
        assert re.search(rf"\b{kernel.get('tflops') or kernel['percent']}\b", performance()), kernel
