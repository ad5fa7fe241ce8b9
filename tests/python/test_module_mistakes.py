"""Mistakes planted in attnd are found by random programs of training (module_programs.py)."""
import gc

import pytest

torch = pytest.importorskip("torch")

import module_mistakes  # noqa: E402
import module_programs  # noqa: E402

from attnd.modules import chain, local, optimizer, parameters, stack, stepping, watch  # noqa: E402

pytestmark = [pytest.mark.rare("modules"), pytest.mark.filterwarnings("ignore")]


def zero_is_none(patch):
    real = parameters.GradientState.scale
    patch.setattr(parameters.GradientState, "scale", lambda self, factor: real(self, factor or 1.0))


def options_of_the_first_step(patch):
    real, kept = optimizer._values_of, {}
    patch.setattr(optimizer, "_values_of", lambda kind, group: kept.setdefault(id(group["params"]), real(kind, group)))


def one_count_of_steps(patch):
    real, most = stepping.ParameterStep, [0]

    def step(values=0, step=0, multiplier=1.0):
        most[0] = max(most[0], step)
        return real(values, most[0] if step else 0, multiplier)
    patch.setattr(stepping, "ParameterStep", step)


def moments_of_frozen_parameters_are_lost(patch):
    patch.setattr(stepping.Stepping, "_put_parked", lambda self: self._parked.clear())


def steps_of_cleared_gradients(patch):
    real = stepping.Stepping.flush

    def flush(self, *caller):
        real(self, *caller)
        for state in self._grads.values():
            state.is_lost = False
    patch.setattr(stepping.Stepping, "flush", flush)


def layers_are_described_once(patch):
    patch.setattr(watch.Watch, "changed", lambda self: False)


def changes_of_gradients_do_nothing(patch):
    patch.setattr(parameters, "_refuse_gradient", lambda self, what: self)


def every_norm_is_of_order_2(patch):
    real = stepping.Stepping.gradient_norm
    patch.setattr(stepping.Stepping, "gradient_norm", lambda self, name, order: real(self, name, 2))


def layers_that_are_left_out_run(patch):
    real = chain.Run
    patch.setattr(chain, "Run", lambda stack, module, versions, call, layers: real(stack, module, versions, call,
                                                                                    (0, len(stack))))


def layers_that_are_left_out_have_gradients(patch):
    real = stack.RemoteStack.names_of
    patch.setattr(stack.RemoteStack, "names_of", lambda self, layers: real(self, (0, len(self))))


def gradients_of_inputs_reach_the_weights(patch):
    patch.setattr(stack.RemoteStack, "wants_gradients", lambda self: True)


def what_was_called_is_computed_late(patch):
    patch.setattr(stack.RemoteStack, "run_pending", lambda self: None)


def loaded_weights_stay_here(patch):
    real = stack.RemoteStack.assign
    patch.setattr(stack.RemoteStack, "assign", lambda self, tensors, what: real(self, {} if self.module else tensors, what))


def hooks_are_taken_and_not_run(patch):
    patch.setattr(watch._NoHooks, "__setitem__", watch.collections.OrderedDict.__setitem__)


def one_forgotten_gradient_is_stepped(patch):
    real = stepping.Stepping.forget
    patch.setattr(stepping.Stepping, "forget", lambda self, names: real(self, names) if len(list(names)) > 1 else None)


def one_forgotten_gradient_comes_again(patch):
    patch.setattr(stepping.Stepping, "_stale", property(lambda self: set(), lambda self, value: None), raising=False)


def multipliers_are_left_out(patch):
    real = stepping.ParameterStep
    patch.setattr(stepping, "ParameterStep", lambda values=0, step=0, multiplier=1.0: real(values, step))


def unscaled_gradients_are_added_to(patch):
    def before_backward(self, names):
        self.flush()
        self.settle()
        self._norms = None
        for state in self._grads.values():
            state.factor = 1.0
    patch.setattr(stepping.Stepping, "before_backward", before_backward)


def lent_weights_do_not_come_back(patch):
    patch.setattr(local, "_same_bits", lambda one, other: True)


def lent_gradients_do_not_come_back(patch):
    patch.setattr(stepping, "digest", lambda tensor: 1)


SERVER = [zero_is_none, options_of_the_first_step, one_count_of_steps, moments_of_frozen_parameters_are_lost,
          steps_of_cleared_gradients, layers_are_described_once, changes_of_gradients_do_nothing, every_norm_is_of_order_2,
          layers_that_are_left_out_run, layers_that_are_left_out_have_gradients, gradients_of_inputs_reach_the_weights,
          what_was_called_is_computed_late,
          loaded_weights_stay_here, hooks_are_taken_and_not_run, one_forgotten_gradient_is_stepped,
          one_forgotten_gradient_comes_again, multipliers_are_left_out, unscaled_gradients_are_added_to,
          lent_weights_do_not_come_back, lent_gradients_do_not_come_back]


def weights_are_told_by_their_versions(patch):
    patch.setattr(stack, "digest", lambda tensor: hash((tensor.data_ptr(), tensor._version)))


def weights_are_sent_once(patch):
    patch.setattr(stack, "digest", lambda tensor: 1)


LOCAL = [weights_are_told_by_their_versions, weights_are_sent_once]


def is_found(mode, seeds, restart):
    for n, seed in enumerate(seeds):
        if n % 10 == 0:
            gc.collect()
        try:
            if module_programs.run(seed, mode, restart=restart):
                return True
        except Exception:  # loud, in a place where it should not be
            return True
    return False


@pytest.mark.parametrize("mistake", [*SERVER, *LOCAL], ids=lambda mistake: mistake.__name__)
def test_planted_mistakes_are_found(mistake, monkeypatch, restart):
    mistake(monkeypatch)
    assert is_found("local" if mistake in LOCAL else "server", range(2000), restart)


@pytest.mark.parametrize("kind", [*module_mistakes.MISTAKES])
def test_programs_that_have_an_action_find_its_mistake(kind, monkeypatch, restart):
    seeds = [seed for seed in range(2000) if kind in module_programs.kinds_of(seed)]
    module_mistakes.MISTAKES[kind](monkeypatch)
    assert is_found("server", seeds, restart)
