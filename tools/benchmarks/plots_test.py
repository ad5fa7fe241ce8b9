"""./dev plots: four pictures, from figures that stand in docs/figures where they say so."""
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


def read(page):
    with open(os.path.join(ROOT, "docs", page)) as file:
        return file.read()


def test_draws_what_the_documents_show(tmp_path):
    plots.main(str(tmp_path))
    assert {name + ".svg" for name in plots.PLOTS} == set(os.listdir(tmp_path))
    for name in plots.PLOTS:
        text = (tmp_path / f"{name}.svg").read_text()
        kept = open(os.path.join(ROOT, "docs/pictures", name + ".svg")).read()
        words = [re.findall(r">([^<>\n]+)</text>", picture) for picture in (text, kept)]
        assert words[0] == words[1], f"{name}: run ./dev plots"
        assert xml.etree.ElementTree.fromstring(kept).tag.endswith("svg")
        assert f"pictures/{name}.svg" in read("PERFORMANCE.md")


def cpu_rows(page):
    """{"512, 64": [forward, backward, causal forward, causal backward of three machines]}"""
    section = page.partition("## float32?")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+, \d+) \| (full|causal) \|(.*)\|$", section, re.M)
    cells = {(shape, mask): [float(x) for x in re.findall(r"\d+\.\d+", numbers)] for shape, mask, numbers in rows}
    order = [(mask, 2 * machine) for machine in range(3) for mask in ("full", "causal")]
    return {shape: sum((cells[shape, mask][at:at + 2] for mask, at in order), []) for shape, _ in cells}


def test_figures_are_those_of_the_tables():
    machines, page = plots.result("cpu_against_pytorch")["machines"], read("figures/cpu.md")
    drawn = {shape: sum((machines[name][shape] for name in machines), []) for shape in machines["Zen 4"]}
    assert drawn == cpu_rows(page)
    assert drawn != cpu_rows(page.replace("| 2.56 | 1.58 |", "| 2.57 | 1.58 |", 1))
    for kernel in plots.result("kernels")["kernels"]:
        figure = kernel.get("tflops") or kernel["percent"]
        assert re.search(rf"\b{figure}\b", read("figures/gpu.md") + read("figures/volta.md")), kernel
