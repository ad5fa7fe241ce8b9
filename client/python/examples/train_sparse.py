#!/usr/bin/env python3
"""Trains an encoder on a long-range task in several ways: dense, SPION, SAT, and static masks of the same density.

    python3 client/python/examples/train_sparse.py --daemon bazel-bin/server/attnd [--task retrieval] [--plot sparse.png]

Tasks are made by a program: "listops" (nested MIN, MAX, MED and SM of digits), "retrieval" (do two texts of bytes share a
word?), "image" (where in a noisy picture is the bright spot? pixels as a sequence). All attention is the daemon's. The
table has each way's last loss, accuracy on held-out samples, the step of its switch, the median time of a dense, a captured
and a sparse step, and the time of the whole run. "without training on" is the dense model with SPION's patterns at the end:
what the switch costs when nothing adapts. --seeds N trains each way N times; the table then has means and the standard
deviation of the accuracy.
"""
import argparse
import sys
import time
import urllib.request
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import attnd.torch
from attnd import masks
from attnd.sparse import Capture, SparseAttention, SparseTraining, sat, spion
from attnd.sparse.capture import pattern_layout
from train_gpt import Daemon, progress


@dataclass
class Settings:
    task: str = "retrieval"
    steps: int = 300
    length: int = 256
    block: int = 16
    density: float = 0.2
    quantile: float = 0.75
    every: int = 5
    warmup: int = 150
    layers: int = 2
    heads: int = 2
    dim: int = 64
    batch: int = 16
    held_out: int = 256
    learning_rate: float = 2e-3
    seed: int = 1
    seeds: int = 1


# ---- Tasks: tokens [count, length] and classes [count].

def listops(random, count, length):
    """Digits 0 to 9, 10 to 13 the operators, 14 a closing bracket, 15 padding; the class is the value."""
    def expression(room, depth):
        if room < 5 or depth > 3 or (depth and random.random() < 0.6):
            digit = int(random.integers(10))
            return [digit], digit
        kind, tokens, values = int(random.integers(4)), [], []
        for _ in range(int(random.integers(2, 6))):
            part, value = expression((room - 2) // 5, depth + 1)
            tokens, values = tokens + part, values + [value]
        value = (min(values), max(values), int(np.median(values)), sum(values) % 10)[kind]
        return [10 + kind, *tokens, 14], value
    rows, classes = np.full((count, length), 15), np.zeros(count, int)
    for n in range(count):
        tokens, classes[n] = expression(length, 0)
        rows[n, :len(tokens)] = tokens[:length]
    return rows, classes, 16, 10


def retrieval(random, count, length):
    """Two texts of random bytes, one after the other, each with a word of eight equal bytes: the same word? It stands at
    one of two places of a text, as keys of records do."""
    rows, classes = random.integers(0, 16, (count, length)), random.integers(0, 2, count)
    for n in range(count):
        first = random.integers(4)
        for part, word in enumerate((first, (first + (1 - classes[n]) * random.integers(1, 4)) % 4)):
            at = part * length // 2 + (length // 16, 5 * length // 16)[random.integers(2)]
            rows[n, at:at + 8] = 16 + word
    return rows, classes, 20, 2


def image(random, count, length):
    """Square pictures of 16 grey values: in which quarter is the bright spot?"""
    side = int(length ** 0.5)
    if side * side != length:
        raise SystemExit(f"--length: expected a square for --task image, got {length}")
    classes, spot = random.integers(0, 4, count), max(2, side // 5)
    grey = 5 + 3 * random.standard_normal((count, side, side))
    for n, quarter in enumerate(classes):
        y, x = random.integers(0, side // 2 - spot + 1, 2) + (side // 2) * np.array(divmod(quarter, 2))
        grey[n, y:y + spot, x:x + spot] += 8
    return np.clip(grey, 0, 15).astype(int).reshape(count, length), classes, 16, 4


PHASES = ("dense", "captured", "sparse")
TASKS = {"listops": listops, "retrieval": retrieval, "image": image}


def samples(settings, seed, count):
    rows, classes, symbols, kinds = TASKS[settings.task](np.random.default_rng(seed), count, settings.length)
    return torch.tensor(rows), torch.tensor(classes), symbols, kinds


# ---- The model: a pre-norm encoder with mean pooling, as SAT's and SPION's.

class Layer(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.heads, width = settings.heads, settings.dim
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        nn.init.normal_(self.project.weight, std=1.2 * width ** -0.5)  # attention that looks at something from the start
        self.attention = SparseAttention(learned=(settings.length, 16), block=settings.block)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.project(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.inner(self.after(x))


class Model(nn.Module):
    def __init__(self, settings, symbols, kinds):
        super().__init__()
        torch.manual_seed(settings.seed)
        self.symbols = nn.Embedding(symbols, settings.dim)
        self.places = nn.Parameter(0.8 * torch.randn(settings.length, settings.dim))
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
        self.head = nn.Sequential(nn.LayerNorm(settings.dim), nn.Linear(settings.dim, kinds))

    @property
    def attention(self):
        return [layer.attention for layer in self.layers]

    def forward(self, tokens):
        x = self.symbols(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


# ---- Ways to train it.

def static_masks(settings):
    """Longformer, BigBird and a strided mask, as wide as shows about as much as the block pattern."""
    n, block = settings.length, settings.block
    wanted = settings.density * n * n

    def widest(make):
        found = make(1)
        for width in range(1, n):
            if masks.count(make(width), n) > wanted:
                return found
            found = make(width)
        return found
    reach = masks.global_(rows=[(0, 2)], cols=[(0, 2)])
    return {"longformer": widest(lambda w: masks.window(w, w) | reach),
            "bigbird": widest(lambda w: masks.window(w, w) | reach | masks.random_blocks(block // 2, 1, seed=1)),
            "strided": widest(lambda w: masks.window(w, w) | masks.stride(max(2, int(1 / settings.density) * 2)))}


def rule_of(way, settings):
    if way == "SAT":
        return sat(settings.block, density=settings.density, change=30.0, skewness=0.5)
    return spion(settings.block, quantile=settings.quantile)


@dataclass
class Run:
    losses: list
    accuracy: float
    switched_at: object
    seconds: dict  # of a step, by phase; NaN: none was
    kept: dict  # the most bytes of kept maps at the daemon, by phase
    whole_seconds: float
    layouts: list  # of each layer; None: none
    density: float


def accuracy(model, held):
    with torch.no_grad():
        return float((model(held[0]).argmax(-1) == held[1]).float().mean())


def kept_bytes(daemon):
    with open(daemon.metrics_port_file) as file:
        text = urllib.request.urlopen(f"http://127.0.0.1:{file.read().strip()}/metrics").read().decode()
    return sum(float(line.split()[-1]) for line in text.split("\n") if line.startswith("attnd_capture_bytes "))


def train(way, settings, data, held, static, daemon):
    model = Model(settings, *data[2:])
    if way in static:
        for attention in model.attention:
            attention.mask = static[way]
    training = None
    if way in ("SPION", "SAT"):
        training = SparseTraining(model.attention, rule_of(way, settings), warmup=settings.warmup,
                                  every=1 if way == "SAT" else settings.every)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate)
    losses, seconds, kept, bar = [], {phase: [] for phase in PHASES}, dict.fromkeys(PHASES, 0), progress(way, settings.steps)
    for step in range(settings.steps):
        at = slice(step * settings.batch, (step + 1) * settings.batch)
        phase = "captured" if training is not None and training.captures else model.attention[0].phase
        begin = time.perf_counter()
        losses.append(one_step(model, optimizer, training, way, (data[0][at], data[1][at])))
        seconds[phase].append(time.perf_counter() - begin)
        if training is not None and not (phase == "captured" and training.phase == "sparse"):  # the switch frees them
            kept[phase] = max(kept[phase], kept_bytes(daemon))
        bar(step)
    middle = {phase: float(np.median(found)) if found else np.nan for phase, found in seconds.items()}
    layouts = [a._layout for a in model.attention]
    shown = static[way] if way in static else None
    density = masks.count(shown, settings.length) / settings.length ** 2 if shown is not None else \
        float(np.mean([1.0 if layout is None else layout.mean() for layout in layouts]))
    return model, Run(losses, accuracy(model, held), training and training.switched_at, middle, kept,
                      sum(map(sum, seconds.values())), layouts, density)


def one_step(model, optimizer, training, way, batch):
    def backward():
        loss = F.cross_entropy(model(batch[0]), batch[1])
        total = loss
        if way == "SAT" and training.captures:
            total = loss + 0.01 * len(model.layers) * sum(a.pattern_loss() for a in model.attention)
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1)
        return loss.item()
    if training is None:
        loss = backward()
    else:
        with training.step():
            loss = backward()
    optimizer.step()
    return loss


def without_training_on(model, settings, data, held):
    """The dense model's accuracy with the patterns of its own maps, and those maps."""
    maps = []
    for attention in model.attention:
        attention.capture_next(Capture(settings.block, keep=settings.length <= 4096))
    with torch.no_grad():
        model(data[0][:settings.batch])
    for attention in model.attention:
        maps.append(attention.captured.pooled)
        attention.set_pattern(pattern_layout(attention.captured, block=settings.block,
                                             **rule_of("SPION", settings).builder), settings.block)
        attention.captured.release()
    return accuracy(model, held), maps


# ---- What is shown.

def table(seeds, controls):
    """Prints the runs of each seed, and the accuracies of "without training on"."""
    def spread(accuracies):
        deviation = f" ± {np.std(accuracies, ddof=1):.3f}" if len(accuracies) > 1 else ""
        return f"{np.mean(accuracies):.3f}{deviation:8}"

    columns = {"last loss": (lambda run: np.mean(run.losses[-10:]), "9.4f"), "density": (lambda run: run.density, "8.3f"),
               "switch": (lambda run: run.switched_at, "7.0f"),
               **{f"ms {phase}": (lambda run, phase=phase: 1e3 * run.seconds[phase], "11.1f") for phase in PHASES},
               "s whole": (lambda run: run.whole_seconds, "8.1f")}

    def cell(runs, value, form):
        found = [one for one in map(value, runs) if one is not None and one == one]
        return format(np.mean(found), form) if found else "-".rjust(int(form.split(".")[0]))
    print(f"{'way':20} {'accuracy':13}", *[name.rjust(int(form.split(".")[0])) for name, (_, form) in columns.items()])
    for way in seeds[0]:
        runs = [of_seed[way] for of_seed in seeds]
        print(f"{way:20} {spread([run.accuracy for run in runs]):13}", *[cell(runs, *column) for column in columns.values()])
    print(f"{'without training on':20} {spread(controls):13}  (the dense model, with SPION's patterns put in at the end)")


def bars(axes, title, heights):
    """heights: of each way, those of the phases. Ways and phases without any are left out."""
    heights = {way: found for way, found in heights.items() if np.nansum(found) > 0}
    phases = [number for number in range(len(PHASES)) if any(found[number] > 0 for found in heights.values())]
    for place, number in enumerate(phases):
        axes.bar(np.arange(len(heights)) + 0.27 * (place - (len(phases) - 1) / 2),
                 [of_way[number] for of_way in heights.values()], 0.25, label=PHASES[number], color=f"C{number}")
    axes.set_title(title)
    axes.set_xticks(range(len(heights)), list(heights), rotation=20)
    if heights:
        axes.set_ylim(top=1.3 * max(np.nanmax(found) for found in heights.values()))  # the legend lies above the bars
        axes.legend(loc="upper center", ncols=len(phases))


def whole_numbers(axes):
    from matplotlib.ticker import MaxNLocator
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


def plot(path, runs, maps):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(3 * len(maps) + 4, 11), layout="constrained")
    grid = figure.add_gridspec(3, 2 * len(maps))
    axes = figure.add_subplot(grid[0, :])
    axes.set(xlabel="step", ylabel="loss (mean of 5 steps)")
    axes.grid(alpha=0.3)
    for number, (way, run) in enumerate(runs.items()):
        smooth = np.convolve(run.losses, np.ones(5) / 5, "valid")
        axes.plot(np.arange(4, len(run.losses)), smooth, label=way, color=f"C{number}")
        if run.switched_at is not None:
            axes.axvline(run.switched_at, color=f"C{number}", linestyle=":", label=f"{way} becomes sparse")
    axes.legend()
    for layer, pooled in enumerate(maps):
        axes = figure.add_subplot(grid[1, 2 * layer])
        axes.imshow(pooled, cmap="viridis")
        axes.set(title=f"layer {layer}: attention map", xlabel="block of keys", ylabel="block of rows")
        whole_numbers(axes)
        axes = figure.add_subplot(grid[1, 2 * layer + 1])
        layout = runs["SPION"].layouts[layer]
        axes.imshow(np.ones_like(pooled) if layout is None else layout, cmap="gray_r", vmin=0, vmax=1)
        axes.set(title="blocks that SPION keeps" if layout is not None else "SPION has not switched", xlabel="block of keys")
        whole_numbers(axes)
    bars(figure.add_subplot(grid[2, :len(maps)]), "median step, ms", {
        way: [1e3 * run.seconds[phase] for phase in PHASES] for way, run in runs.items()})
    bars(figure.add_subplot(grid[2, len(maps):]), "maps kept at the daemon, KiB", {
        way: [run.kept[phase] / 1024 for phase in PHASES] for way, run in runs.items() if way in ("SPION", "SAT")})
    figure.savefig(path)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--daemon", required=True, help="program to start: bazel-bin/server/attnd")
    parser.add_argument("--plot", help="image to write (needs matplotlib)")
    for name, value in vars(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value,
                            choices=tuple(TASKS) if name == "task" else None)
    chosen = parser.parse_args()
    settings = Settings(**{name: getattr(chosen, name) for name in vars(Settings())})
    torch.set_num_threads(1)
    static, seeds, controls, maps = static_masks(settings), [], [], None
    daemon = Daemon(chosen.daemon, "cpu")
    with attnd.torch.connect(daemon.address, wait_for_ready=True, timeout=120):
        for seed in range(settings.seed, settings.seed + settings.seeds):
            of_seed = replace(settings, seed=seed)
            data = samples(of_seed, seed, settings.steps * settings.batch)
            held = samples(of_seed, seed + 1000, settings.held_out)
            seeds.append({})
            for way in ("dense", "SPION", "SAT", *static):
                model, seeds[-1][way] = train(way, of_seed, data, held, static, daemon)
                if way == "dense":
                    control, maps = without_training_on(model, of_seed, data, held)
                    controls.append(control)
    daemon.stop()
    table(seeds, controls)
    if settings.length < 1024:
        print(f"At length {settings.length} attention is the smaller part of a step, so sparse steps are hardly faster; at "
              "1024 they take a third of the time, at 4096 a tenth (docs/SPARSE_TRAINING.md).")
    if chosen.plot:
        print(f"curves, maps and patterns: {chosen.plot}" if plot(chosen.plot, seeds[-1], maps)
              else f"no {chosen.plot}: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
