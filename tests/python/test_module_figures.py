"""Modules beside PyTorch, number by number and step by step. The whole figures: ATTND_TEST_STEPS=1000 for the optimizers,
ATTND_TEST_CURVE_STEPS=300 ATTND_TEST_CURVE_SEEDS=3 for the curves."""
import copy
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from small_curve import Curve  # noqa: E402

import attnd  # noqa: E402
import attnd.torch  # noqa: E402

STEPS = int(os.environ.get("ATTND_TEST_STEPS", "60"))
CURVE_STEPS = int(os.environ.get("ATTND_TEST_CURVE_STEPS", "12"))
SEEDS = range(int(os.environ.get("ATTND_TEST_CURVE_SEEDS", "1")))
WIDTH, LR, DECAY = 8, 1e-3, 0.01

OPTIMIZERS = {
    "sgd": (attnd.modules.SGD(), torch.optim.SGD, {}),
    "momentum": (attnd.modules.SGD(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adamw": (attnd.AdamW(), torch.optim.AdamW, {}),
    "adam": (attnd.AdamW(coupled_decay=True, amsgrad=True), torch.optim.Adam, {"amsgrad": True}),
}
STATE = {"sgd": {"moment1": "momentum_buffer"},
         "adam": {"moment1": "exp_avg", "moment2": "exp_avg_sq", "moment2_max": "max_exp_avg_sq"}}


def one_linear():
    layout = attnd.modules.Layout(WIDTH)
    block = layout.block()
    block.linear(0, block.parameter("weight", WIDTH, WIDTH))
    layout.layer(block, "")
    return layout


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_within_two_ulps_of_pytorchs(client, rng, name):
    """Both step from the daemon's state. Of x = 1 the weight's gradient is dy transposed, so both have the same."""
    spec, kind, options = OPTIMIZERS[name]
    names = STATE["sgd" if kind is torch.optim.SGD else "adam"]
    module = attnd.register(one_linear(), client, name=f"ulps-{name}", optimizer=spec, max_rows=WIDTH)
    module.put({"weight": np.float32(rng.normal(size=(WIDTH, WIDTH)))})
    kinds, most = ["weight", *spec.moments], 0.0
    state = module.get_kinds(kinds)
    for step in range(STEPS):
        dy = np.float32(rng.normal(size=(WIDTH, WIDTH)))
        parameter = nn.Parameter(torch.from_numpy(state["weight"]["weight"].copy()))
        optimizer = kind([parameter], lr=LR, weight_decay=DECAY, foreach=False, **options)
        if step:
            optimizer.state[parameter] = {names[moment]: torch.from_numpy(state[moment]["weight"].copy())
                                          for moment in spec.moments}
            if kind is not torch.optim.SGD:
                optimizer.state[parameter]["step"] = torch.tensor(float(step))
        parameter.grad = torch.from_numpy(np.ascontiguousarray(dy.T))
        optimizer.step()
        module.backward(dy, module.forward(np.eye(WIDTH, dtype=np.float32), keep=True)[1], want_dx=False)
        module.step(lr=LR, weight_decay=DECAY)
        before, state = state["weight"]["weight"], module.get_kinds(kinds)
        found, expected = np.float64(state["weight"]["weight"]), np.float64(parameter.detach().numpy())
        # The change has roundings of its own, which count where the parameter is as small as it, or as its summands.
        change = np.abs(expected - before)
        if spec.moments and kind is torch.optim.SGD:
            change = LR * (np.abs(dy.T) + spec.momentum * np.abs(state["moment1"]["weight"]))
        size = np.maximum(np.abs(before), np.float32(2 * change))
        most = max(most, float((np.abs(found - expected) / np.spacing(size)).max()))
    module.release()
    print(f"{name}: {STEPS} steps, {most} ulp at most")
    assert most <= 2 and np.abs(found - before).max() > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_curves_end_where_pytorchs_do(daemon, kind, seed):
    attnd.torch.connect(daemon.address, timeout=60, wait_for_ready=True)
    curve = Curve(kind == "gpt", seed)
    here, there = curve.model, copy.deepcopy(curve.model)
    there["stack"].layers = attnd.torch.offload(there["stack"].layers)
    optimizers = [torch.optim.AdamW(here.parameters(), lr=1e-3),
                  attnd.torch.optimizer(torch.optim.AdamW(there.parameters(), lr=1e-3))]
    generator, first = torch.Generator().manual_seed(seed), None
    for _ in range(CURVE_STEPS):
        batch, losses = curve.batch(generator), []
        for model, optimizer in zip((here, there), optimizers):
            optimizer.zero_grad()
            loss = curve.loss(model, *batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        first = first or losses[0]
    attnd.torch.disconnect()
    print(f"{kind}, seed {seed}, {CURVE_STEPS} steps: {first:.4f} to {losses[0]:.6f}, attnd {losses[1] - losses[0]:+.2e}")
    assert losses[0] < first and abs(losses[1] - losses[0]) <= 1e-5
