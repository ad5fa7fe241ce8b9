"""Random programs of training on twins (module_programs.py)."""
import gc

import pytest

torch = pytest.importorskip("torch")

import module_programs  # noqa: E402

import attnd  # noqa: E402

MODES = ["server", "local"]


def check(mode, seeds, restart):
    found = []
    for seed in seeds:
        found += filter(None, [module_programs.run(seed, mode, restart=restart)])
        if seed % 10 == 0:
            gc.collect()  # of stacks, whose modules the daemon has no end of room for
    assert not found, found[:5]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_random_programs_do_what_pytorch_does_or_raise(mode, restart):
    check(mode, range(10), restart)


@pytest.mark.rare("modules")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_more_random_programs_do_what_pytorch_does_or_raise(mode, restart):
    check(mode, range(10, 510 if mode == "server" else 160), restart)


def test_a_refused_action_that_has_changed_weights_is_found(monkeypatch, restart):
    def act(twin):
        with torch.no_grad():
            twin.net.get_parameter("layers.0.0.weight").add_(1.0)
        raise attnd.Unimplemented("planted")
    monkeypatch.setattr(module_programs, "ACTIONS", {"planted": (lambda draw: act, 1)})
    assert "has changed ['layers.0.0.weight']" in module_programs.run(0, "local", restart=restart)
