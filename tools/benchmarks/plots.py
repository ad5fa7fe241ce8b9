"""Draws the four plots of docs/PERFORMANCE.md from tools/benchmarks/results: `./dev plots`.

    python3 tools/benchmarks/plots.py [FOLDER]      (needs matplotlib; FOLDER: docs/pictures)

To show other figures, put them into the JSON files; `source` says where each comes from. wire.json and latency.json are
written by measure_plots.py.
"""
import json
import os
import sys

import matplotlib
import numpy as np

matplotlib.rcParams.update({"svg.hashsalt": "attnd", "svg.fonttype": "none", "font.size": 11, "axes.grid": True,
                            "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
from matplotlib.figure import Figure  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def result(name):
    with open(os.path.join(HERE, "results", name + ".json")) as file:
        return json.load(file)


def axes_of(**settings):
    axes = Figure(figsize=(8, 4.6), layout="constrained").subplots()
    axes.set(**settings)
    return axes


def draw_roofline():
    """TFLOP/s over FLOP a byte of HBM, with what the cards can, and what links leave of it."""
    data = result("kernels")
    axes = axes_of(xscale="log", yscale="log", xlabel="FLOP a byte that is moved (attention forward: N/2 of HBM)",
                   ylabel="TFLOP/s", title="Forward kernels under their roofs")
    work = np.logspace(0, 5, 200)
    for name, card in data["cards"].items():
        axes.plot(work, np.minimum(card["tflops"], card["hbm_gb_s"] * work / 1000), color=card["colour"],
                  label=f"{name}: {card['tflops']} TFLOP/s, {card['hbm_gb_s']} GB/s")
    for name, speed in data["links"].items():
        axes.plot(work, speed * work / 1000, color="grey", linestyle=":" if speed < 5 else "--", label=f"link of {name}")
    for kernel in data["kernels"]:
        card = data["cards"][kernel["card"]]
        reached = kernel.get("tflops") or card["tflops"] * kernel["percent"] / 100
        simulated = "percent" in kernel
        axes.plot(kernel["length"] / 2, reached, marker="o" if kernel["head_dim"] == 128 else "s", linestyle="none",
                  color=card["colour"], markerfacecolor="white" if simulated else card["colour"])
    for label, marker, face in (("head_dim 128", "o", "black"), ("head_dim 64", "s", "black"), ("simulated", "o", "white")):
        axes.plot([], [], marker=marker, linestyle="none", color="black", markerfacecolor=face, label=label)
    axes.set(xlim=(10, 1e5), ylim=(1e-2, 2e3))
    axes.legend(fontsize=9, loc="lower right")
    return axes.figure


def draw_cpu():
    """PyTorch's time over the CPU engine's."""
    data = result("cpu_against_pytorch")
    shapes = list(next(iter(data["machines"].values())))
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    figure.suptitle("CPU engine: PyTorch's time over attnd's, float32")
    for n, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        axes.set_title(["forward", "backward"][n], fontsize=11)
        for m, (machine, ratios) in enumerate(data["machines"].items()):
            for causal in (False, True):
                values = [ratios[shape][n + 2 * causal] for shape in shapes]
                place = np.arange(len(shapes)) + 0.13 * (2 * m + causal - 2.5)
                axes.bar(place, values, 0.12, color=f"C{m}", alpha=0.55 if causal else 1,
                         label=machine + (", causal" if causal else ""))
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(shapes)), [shape.replace(", ", "\n") for shape in shapes], fontsize=9)
        axes.set_xlabel("N, head_dim")
    axes.set_ylim(0, 4.3)
    axes.legend(fontsize=7, ncol=3)
    return figure


def draw_wire():
    """GB/s over connections."""
    data = result("wire")
    axes = axes_of(xlabel="connections", ylabel="GB/s", title=data["title"])
    for n, (name, speeds) in enumerate(data["series"].items()):
        axes.plot(data["connections"], speeds, marker="o", color=f"C{n}", label=name)
    axes.set_xticks(data["connections"])
    axes.set_ylim(bottom=0)
    axes.legend()
    return axes.figure


def draw_latency():
    """Share of calls that took no longer."""
    data = result("latency")
    axes = axes_of(xscale="log", xlabel="milliseconds", ylabel="share of calls", title=data["title"])
    for n, (name, values) in enumerate(data["series"].items()):
        axes.plot(values, np.array(data["shares"]), color=f"C{n}", label=name)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 0.99])
    axes.legend()
    return axes.figure


PLOTS = {"roofline": draw_roofline, "cpu_against_pytorch": draw_cpu, "wire": draw_wire, "latency": draw_latency}


def main(folder):
    for name, draw in PLOTS.items():
        path = os.path.join(folder, name + ".svg")
        draw().savefig(path, metadata={"Date": None})
        print(os.path.relpath(path))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "docs", "pictures"))
