"""Mistakes planted in attnd, by actions of optimizer_actions, model_actions and graph_actions: programs that have the action
find its mistake. Each takes a pytest.MonkeyPatch."""
import contextlib
import types

import torch

import attnd.torch
from attnd.modules import chain, layers, local, optimizer, owning, parameters, remote_call, stack, states, watch
from attnd.modules.module import Module
from attnd.modules.optimizer import RemoteOptimizer
from attnd.modules.parameters import RemoteParameter
from attnd.modules.stack import RemoteStack
from attnd.modules.stepping import Stepping

MISTAKES = {}


def mistake(*kinds):
    def add(fn):
        MISTAKES.update(dict.fromkeys(kinds, fn))
        return fn
    return add


def around(patch, owner, name, change):
    """change(real, *arguments, **keywords) in a function's place."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **keywords: change(real, *arguments, **keywords))


def values_with(patch, change):
    around(patch, optimizer, "_values_of", lambda real, kind, group: change(real(kind, group), group))


def asked(patch, names, answer):
    """Functions of PyTorch on remote parameters give something else."""
    real = parameters._Numbers.__torch_function__.__func__

    def function(cls, called, types, arguments=(), keywords=None):
        if parameters.called(called)[0] in names:
            return answer(called, arguments, keywords)
        return real(cls, called, types, arguments, keywords)
    patch.setattr(parameters._Numbers, "__torch_function__", classmethod(function))


@mistake("look_at_moments")
def first_moments_are_zero(patch):
    around(patch, Stepping, "moments", lambda real, self: {
        kind: {name: tensor * (kind != "moment1") for name, tensor in found.items()} for kind, found in real(self).items()})


@mistake("look_at_gradients")
def fetched_gradients_are_not_multiplied(patch):
    patch.setattr(RemoteStack, "gradient", lambda self, name: self._numbers([name])[name] / self._grads[name].factor)


@mistake("resume", "exchange")
def loaded_moments_are_lost(patch):
    patch.setattr(Stepping, "_put_moments", lambda self, moments: None)


@mistake("scale_loop")
def unscaling_does_not_multiply(patch):
    patch.setitem(parameters._OPERATIONS, "_amp_foreach_non_finite_check_and_unscale_", lambda *_: None)


@mistake("hook_of_steps")
def hooks_of_steps_run_twice(patch):
    def change(real, self, inverse):
        for hook in [*self._optimizer_step_pre_hooks.values(), *self._optimizer_step_post_hooks.values()]:
            hook(self)
        real(self, inverse)
    around(patch, RemoteOptimizer, "_step_here", change)


@mistake("hook_of_states")
def hooks_see_a_part_of_the_state(patch):
    patch.setattr(RemoteOptimizer, "_unhooked", lambda self: contextlib.nullcontext())


@mistake("named_optimizer")
def names_of_parameters_are_left_out(patch):
    def change(real, self):
        found = real(self)
        for group in found["param_groups"]:
            group.pop("param_names", None)
        return found
    around(patch, RemoteOptimizer, "state_dict", change)


@mistake("groups_by_name")
def eps_is_that_of_the_defaults(patch):
    values_with(patch, lambda values, group: values._replace(epsilon=1e-4) if values.epsilon else values)


@mistake("faster_optimizer")
def fast_optimizers_do_not_decay(patch):
    values_with(patch, lambda values, group: values._replace(weight_decay=0.0) if group.get("foreach") or group.get("fused")
                else values)


@mistake("rate_as_tensor")
def rates_are_kept_by_object(patch):
    kept = {}

    def change(values, group):
        lr = group["lr"]
        return values._replace(lr=kept.setdefault(id(lr), (lr, values.lr))[1]) if isinstance(lr, torch.Tensor) else values
    values_with(patch, change)


@mistake("change_more_options")
def options_are_kept_from_the_first_step(patch):
    kept = {}
    around(patch, RemoteOptimizer, "_steps", lambda real, self: [(one, {
        name: (kept.setdefault((id(self), name), values)._replace(lr=values.lr), 1.0)
        for name, (values, _) in steps.items()}) for one, steps in real(self)])


@mistake("optimizer_of_a_part")
def what_no_optimizer_has_is_stepped(patch):
    def change(real, self, one, steps, *rest):
        if steps and len(steps) < len(self._cached):
            steps = {**{name: next(iter(steps.values())) for name in self._cached}, **steps}
        patch.setattr(Stepping, "owner", lambda self, name: one)
        return real(self, one, steps, *rest)
    around(patch, Stepping, "stage", change)


@mistake("add_group_of_others")
def new_groups_have_the_options_of_the_first(patch):
    def change(real, self, group):
        real(self, group)
        self.param_groups[-1].update({key: value for key, value in self.param_groups[0].items() if key in (
            "lr", "weight_decay")})
    around(patch, RemoteOptimizer, "add_param_group", change)


@mistake("move_to_another_group")
def parameters_keep_their_rate(patch):
    kept = {}
    around(patch, RemoteOptimizer, "_steps", lambda real, self: [(one, {
        name: (values._replace(lr=kept.setdefault((id(self), name), values.lr)), sign)
        for name, (values, sign) in steps.items()}) for one, steps in real(self)])


@mistake("two_kinds_of_optimizers")
def decay_is_that_of_the_optimizer_before(patch):
    last = []

    def change(values, group):
        last.append(values)
        return values._replace(weight_decay=last[-2].weight_decay) if len(last) > 1 else values
    values_with(patch, change)


@mistake("step_of_an_old_optimizer")
def an_old_optimizer_steps_nothing(patch):
    around(patch, Stepping, "stage", lambda real, self, one, steps, *rest: real(self, one, {
        name: value for name, value in steps.items() if self.owner(name) is one}, *rest))


@mistake("lbfgs")
def other_optimizers_step_here_alone(patch):
    def change(real, inner):
        here = [p for p in inner.param_groups[0]["params"] if not isinstance(p, RemoteParameter)]
        return real(inner) if type(inner) in optimizer._KINDS else type(inner)(here, lr=0.1, max_iter=3)
    around(patch, attnd.torch, "optimizer", change)


@mistake("schedules_of_all")
def only_rates_are_looked_at_again(patch):
    kept = {}
    values_with(patch, lambda values, group: kept.setdefault(id(group["params"]), values)._replace(lr=values.lr))


@mistake("schedule_before_wrapping")
def groups_are_copied(patch):
    def change(real, self, inner):
        real(self, inner)
        self.copied = [dict(group) for group in inner.param_groups]
    around(patch, RemoteOptimizer, "__init__", change)
    patch.setattr(RemoteOptimizer, "param_groups", property(
        lambda self: getattr(self, "copied", self._inner.param_groups), lambda self, value: setattr(self, "copied", value)))


@mistake("change_gradients")
def changes_of_gradients_are_ignored(patch):
    patch.setattr(parameters, "_refuse_gradient", lambda self, what: self)


@mistake("exchange_gradients")
def gradients_that_are_set_are_ignored(patch):
    patch.setattr(RemoteParameter, "grad", property(RemoteParameter.grad.fget, lambda self, value: None))


@mistake("clip_with_a_norm")
def lists_of_gradients_are_not_multiplied(patch):
    patch.setitem(parameters._OPERATIONS, "_foreach_mul_", lambda *_: None)
    patch.setitem(parameters._OPERATIONS, "mul_", lambda gradients, *_: gradients[0])


@mistake("backward_into_parameters")
def inputs_of_a_backward_are_ignored(patch):
    asked(patch, {"backward"}, parameters._plain)


@mistake("gradients_of_parameters")
def gradients_of_remote_parameters_are_none(patch):
    asked(patch, {"grad"}, lambda called, arguments, keywords: [
        torch.zeros(p.shape) if g is None else g for p, g in zip(arguments[1], parameters._plain(
            called, arguments, {**keywords, "allow_unused": True}))])


@mistake("call_at_once")
def the_last_layer_is_left_out(patch):
    around(patch, stack, "call_layers", lambda real, self, layers, *rest, **keywords: real(
        self, (layers[0], layers[1] - (layers[1] - layers[0] > 1)), *rest, **keywords))


@mistake("call_with_tensors", "replace_layer", "new_parameter", "without_bias")
def what_is_put_into_layers_is_not_seen(patch):
    patch.setattr(watch.Watch, "changed", lambda self: False)


@mistake("call_by_functions", "hook_of_all_modules")
def what_is_around_layers_is_not_seen(patch):
    patch.setattr(stack, "refuse_around", lambda: None)


@mistake("backward_hook_of_a_layer")
def hooks_of_backward_are_dropped(patch):
    around(patch, torch.nn.Module, "register_full_backward_hook",
           lambda real, self, hook: types.SimpleNamespace(remove=int) if "forward" in self.__dict__ else real(self, hook))


@mistake("write_an_input")
def inputs_are_read_late(patch):
    patch.setattr(chain, "_versions", lambda *_: ())


@mistake("checkpoint_of_several", "backward_of_two")
def every_other_backward_is_of_inputs_alone(patch):
    count = []
    around(patch, RemoteStack, "wants_gradients", lambda real, self: bool(count.append(1) or len(count) % 2) and real(self))


@mistake("kept_elsewhere")
def anomalies_double_gradients(patch):
    around(patch, remote_call.Part, "backward", lambda real, self, dy: real(self, dy * (1 + torch.is_anomaly_enabled())))


@mistake("gradient_penalty")
def second_derivatives_are_zero(patch):
    def backward(ctx, dy):
        with torch.no_grad():
            return ctx.part.backward(dy.detach())
    patch.setattr(chain.LayerCall, "backward", staticmethod(backward))


@mistake("penalty")
def squares_of_remote_parameters_are_zero(patch):
    asked(patch, {"square"}, lambda called, arguments, keywords: torch.zeros(()))


@mistake("tie_layers", "swap_layers")
def parameters_of_others_are_left_where_they_are(patch):
    around(patch, owning.Owning, "take", lambda real, self, cached: real(self, {
        name: p for name, p in cached.items() if not isinstance(p, RemoteParameter)}))
    patch.setattr(stack, "describe_apart", lambda named: stack.describe_all(named, layers.Variant()))


@mistake("change_the_list")
def changes_of_the_list_are_ignored(patch):
    for name in ("append", "extend", "insert", "pop", "__delitem__"):
        patch.setattr(RemoteStack, name, lambda self, *_: self[2])


@mistake("moving_average", "vector_of_weights", "train_under_both")
def lent_weights_stay_here(patch):
    patch.setattr(local, "_same_bits", lambda one, other: True)


@mistake("weights_of_the_average")
def loaded_biases_stay_here(patch):
    around(patch, RemoteStack, "assign", lambda real, self, tensors, what: real(self, {
        name: tensor for name, tensor in tensors.items() if "bias" not in name}, what))


@mistake("move_net")
def types_are_taken_and_ignored(patch):
    patch.setattr(RemoteStack, "_apply", lambda self, fn, recurse=True: self)


@mistake("save_whole")
def pickling_loses_the_numbers(patch):
    patch.setattr(RemoteParameter, "__reduce_ex__", lambda self, protocol: (torch.zeros, (tuple(self.shape),)))
    patch.setattr(RemoteStack, "__reduce_ex__", lambda self, protocol: (torch.nn.Sequential, ()))


@mistake("go_on_with_a_copy", "distill")
def copies_have_new_norms(patch):
    def change(real, layer, memo):
        made = real(layer, memo)
        made[4].load_state_dict({"weight": torch.ones(16), "bias": torch.zeros(16)})
        return made
    around(patch, stack, "_copied", change)


@mistake("train_two_nets")
def the_first_stack_steps_alone(patch):
    around(patch, RemoteOptimizer, "_steps", lambda real, self: real(self)[:1])


@mistake("autocast")
def bfloat16_is_cut(patch):
    around(patch, remote_call, "tensor_of", lambda real, array, element, to, device: real(array, element, to, device) * (
        0.5 if to == torch.bfloat16 else 1))


@mistake("backward_of_nothing")
def an_empty_backward_gives_no_gradients(patch):
    around(patch, Stepping, "after_backward", lambda real, self, names, is_empty: None if is_empty else real(
        self, names, is_empty=is_empty))


@mistake("calls_from_threads")
def threads_share_a_call(patch):
    kept = []
    around(patch, remote_call.Run, "forward", lambda real, self, x, *rest: kept.append(real(self, x, *rest)) or (
        kept[-2] if len(kept) % 5 == 0 and kept[-2].shape == kept[-1].shape else kept[-1]))


@mistake("freeze_modules")
def freezing_is_not_seen(patch):
    patch.setattr(parameters, "_touched", lambda self: None)


@mistake("parametrize", "write_a_weight")
def writes_of_parameters_are_ignored(patch):
    patch.setattr(parameters, "_refuse", lambda self, what: self)


@mistake("states_of_parts")
def states_of_parts_have_no_prefix(patch):
    around(patch, states._Fill, "__call__", lambda real, self, module, found, prefix, rest: real(
        self, module, found, "", rest))


@mistake("encoder_with_masks")
def padding_is_ignored(patch):
    around(patch, Module, "forward", lambda real, self, x, **keywords: real(self, x, **{**keywords, "kv_lengths": None}))


@mistake("restart_the_daemon")
def nothing_is_replayed(patch):
    around(patch, stack.StackOptions, "__new__", lambda real, cls, *arguments: real(cls, *arguments)._replace(replay_mib=0))
