"""attnd.torch.offload: stacks of layers on a daemon beside the same layers here, in float32."""
import copy
import gc
import os
import sys

import numpy as np
import pytest
from conftest import ROOT, SERVER

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import attnd  # noqa: E402
import attnd.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("connected")


class Model(nn.Module):
    """An embedding and a head here, two encoder layers to be offloaded."""

    def __init__(self, dropout=0.0, **options):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens, **masks):
        return self.head(self.encoder(self.embedding(tokens), **masks))


def pair(**options):
    """The same model twice: here, and with its stack on the daemon."""
    here = Model(**{key: value for key, value in options.items() if key not in ("optimizer", "precision")})
    there = copy.deepcopy(here)
    there.encoder.layers = attnd.torch.offload(
        there.encoder.layers, **{key: value for key, value in options.items() if key in ("optimizer", "precision")})
    return here, there


def data(steps=1, batch=2, length=6):
    tokens = torch.randint(0, 11, (steps, batch, length + 1))
    return tokens[..., :-1], tokens[..., 1:]


def loss_of(model, tokens, targets, **masks):
    return nn.functional.cross_entropy(model(tokens, **masks).reshape(-1, 11), targets.reshape(-1))


def check_states(here, there, atol):
    expected, found = here.state_dict(), there.state_dict()
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        assert found[name].device.type == "cpu" and found[name].dtype == tensor.dtype
        if name.endswith("in_proj_bias"):  # the keys' has no gradient but rounding, which Adam makes as large as any
            tensor, found[name] = [torch.cat((bias[:16], bias[32:])) for bias in (tensor, found[name])]
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.01, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "groups": lambda model: torch.optim.AdamW([
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "weight_decay": 0.2},
        {"params": [p for n, p in model.named_parameters() if not n.endswith("weight")], "lr": 3e-3, "betas": (0.8, 0.9)}],
        lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_follows_the_same_curve(name):
    here, there = pair(norm_first=name == "groups", activation="gelu" if name == "adam" else "relu")
    optimizers = [OPTIMIZERS[name](here), attnd.torch.optimizer(OPTIMIZERS[name](there))]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 25) for one in optimizers]
    tokens, targets = data(20)
    for step in range(20):
        losses = []
        for model, optimizer, scheduler in zip((here, there), optimizers, schedulers):
            optimizer.zero_grad()
            loss = loss_of(model, tokens[step], targets[step])
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], abs=2e-5), step
    check_states(here, there, 3e-4)


def test_masks_reach_the_daemon():
    here, there = pair()
    tokens, targets = data()
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    middle = torch.tensor([[False, True] + [False] * 4, [False] * 6])
    for masks in ({"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True},
                  {"mask": causal, "src_key_padding_mask": padding}, {"src_key_padding_mask": middle},
                  {"mask": torch.rand(6, 6) > 0.5}):
        if "mask" in masks and masks["mask"].dtype == torch.bool:
            masks["mask"].fill_diagonal_(False)
        ours, theirs = there(tokens[0], **masks), here(tokens[0], **masks)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_float_mask_with_numbers_raises():
    _, there = pair()
    with pytest.raises(attnd.Unimplemented, match="bias"):
        there(data()[0][0], mask=torch.rand(6, 6))


def test_state_dict_and_optimizer_state_make_the_round_trip():
    here, there = pair()
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(there.parameters(), lr=1e-2))
    tokens, targets = data(4)

    def steps(model, stepper, some):
        for n in some:
            stepper.zero_grad()
            loss_of(model, tokens[n], targets[n]).backward()
            stepper.step()
    check_states(here, there, 0)
    steps(there, optimizer, (0, 1))
    weights, moments = copy.deepcopy(there.state_dict()), copy.deepcopy(optimizer.state_dict())
    alone = torch.optim.AdamW(here.parameters(), lr=1e-2)
    here.load_state_dict(weights)
    alone.load_state_dict(copy.deepcopy(moments))  # a checkpoint is PyTorch's own
    steps(there, optimizer, (2, 3))
    steps(here, alone, (2, 3))
    check_states(here, there, 2e-5)
    after = there.state_dict()
    there.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    check_states(there, there, 0)
    steps(there, optimizer, (2, 3))
    for name, tensor in there.state_dict().items():
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=0)


@pytest.mark.parametrize("clips", [attnd.torch.clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_clipping_spans_both_sides(clips):
    here, there = pair()
    optimizers = [torch.optim.SGD(here.parameters(), lr=0.5),
                  attnd.torch.optimizer(torch.optim.SGD(there.parameters(), lr=0.5))]
    tokens, targets = data()
    norms = []
    for model, optimizer, clip in zip((here, there), optimizers, (nn.utils.clip_grad_norm_, clips)):
        loss_of(model, tokens[0], targets[0]).backward()
        norms.append(float(clip(model.parameters(), 0.1)))
        optimizer.step()
    assert norms[1] == pytest.approx(norms[0], rel=1e-5) and norms[0] > 0.1
    check_states(here, there, 1e-6)


@pytest.mark.parametrize("clips", [None, attnd.torch.clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_grad_scaler_scales_and_skips(clips):
    here, there = pair()
    optimizers = [torch.optim.AdamW(here.parameters(), lr=1e-2),
                  attnd.torch.optimizer(torch.optim.AdamW(there.parameters(), lr=1e-2))]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100) for _ in optimizers]
    tokens, targets = data(4)
    for step in range(4):
        for model, optimizer, scaler in zip((here, there), optimizers, scalers):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 else 1.0
            scaler.scale(loss_of(model, tokens[step], targets[step]) * factor).backward()
            if clips is attnd.torch.clip_grad_norm_ and model is there:
                clips(model, 0.5, scaler=scaler, optimizer=optimizer)
            elif clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (512.0 if step >= 2 else 1024.0)
    check_states(here, there, 1e-4)


def test_what_a_scaler_sees_is_where_gradients_are():
    """A scaler on a GPU sends its numbers to other devices without waiting for them."""
    here, there = pair()
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(there.parameters(), lr=1e-2))
    tokens, targets = data(1)
    loss_of(there, tokens[0], targets[0]).backward()
    stack, seen = optimizer.stacks[0], list(there.encoder.parameters())
    assert stack.device.type == seen[0].grad.device.type == "cpu"
    loss_of(there, tokens[0], targets[0]).backward()
    stack.device = torch.device("meta")
    assert seen[0].grad.device.type == "meta"


def test_what_would_pass_over_remote_parameters_is_refused():
    _, there = pair()
    optimizer = attnd.torch.optimizer(torch.optim.AdamW(there.parameters(), lr=1e-2))
    tokens, targets = data(1)
    loss_of(there, tokens[0], targets[0]).backward()
    for kind in (torch.optim.AdamW, torch.optim.Adagrad):
        with pytest.raises(TypeError, match=rf"attnd.torch.optimizer\({kind.__name__}|optimizer=.local."):
            kind(there.parameters(), lr=1e-2).step()
    torch.optim.AdamW(there.head.parameters(), lr=1e-2).step()
    first = next(there.encoder.parameters())
    with pytest.raises(attnd.InvalidArgument, match="grad: expected None"):
        first.grad = torch.zeros(1)
    first.grad.mul_(0.5)
    loss_of(there, tokens[0], targets[0]).backward()
    both = float(first.grad.norm())
    there.zero_grad()
    assert first.grad is None
    loss_of(there, tokens[0], targets[0]).backward()
    norm = float(first.grad.norm())
    assert both == pytest.approx(1.5 * norm, rel=0.05)  # half of one, and one; the head has changed between
    there.zero_grad(set_to_none=False)
    assert float(first.grad.norm()) == 0
    loss_of(there, tokens[0], targets[0]).backward()
    assert float(first.grad.norm()) == norm  # not twice as much
    with pytest.raises(attnd.Unimplemented, match=r"clamp.* gradient of 0.self_attn.in_proj_weight is on a daemon"):
        nn.utils.clip_grad_value_(there.parameters(), norm / 2)


def test_a_refused_step_changes_no_stack():
    first, second = [attnd.torch.offload(nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))) for _ in range(2)]
    optimizer = attnd.torch.optimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    second(first(torch.randn(2, 3, 16))).square().sum().backward()
    before = first.state_dict()
    last = second[0].get_parameter("0.bias")
    groups = optimizer.param_groups
    groups.append({**groups[0], "params": [last], "momentum": 0.5})
    groups[0]["params"] = [parameter for parameter in groups[0]["params"] if parameter is not last]
    with pytest.raises(attnd.FailedPrecondition, match="momentum was switched on"):
        optimizer.step()
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_local_optimizer_gets_gradients():
    here, there = pair(optimizer="local")
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=1e-2) for model in (here, there)]
    tokens, targets = data(5)
    for step in range(5):
        for model, optimizer in zip((here, there), optimizers):
            optimizer.zero_grad()
            loss_of(model, tokens[step], targets[step]).backward()
            optimizer.step()
    check_states(here, there, 1e-5)


def test_two_backwards_add_up_in_either_mode():
    for mode in ("server", "local"):
        here, there = pair(optimizer=mode)
        optimizers = [torch.optim.SGD(here.parameters(), lr=0.1),
                      attnd.torch.optimizer(torch.optim.SGD(there.parameters(), lr=0.1))]
        tokens, targets = data(3)
        for model, optimizer in zip((here, there), optimizers):
            first, second = [loss_of(model, tokens[n], targets[n]) for n in range(2)]
            second.backward()
            first.backward()
            loss_of(model, tokens[2], targets[2]).backward()
            optimizer.step()
        check_states(here, there, 2e-6)


def test_eval_has_no_dropout_and_training_repeats_with_its_seed():
    here, there = pair(dropout=0.2)
    tokens, targets = data()
    torch.testing.assert_close(there.eval()(tokens[0]), here.eval()(tokens[0]), rtol=1e-5, atol=1e-5)
    there.train()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = loss_of(there, tokens[0], targets[0])
        loss.backward()
        runs.append(loss.item())
    assert runs[0] == runs[1] != runs[2]
    there.zero_grad()
    there.encoder.layers.discard()
    there.eval()
    loss_of(there, tokens[0], targets[0]).backward()
    loss_of(here.eval(), tokens[0], targets[0]).backward()
    torch.testing.assert_close(there.embedding.weight.grad, here.embedding.weight.grad, rtol=1e-4, atol=1e-6)


def test_unused_activations_are_given_back():
    _, there = pair(dropout=0.2)
    tokens, targets = data()
    for n in range(6):
        loss_of(there, tokens[0], targets[0])  # a loss that is thrown away
        with torch.no_grad():
            there(tokens[0])


@pytest.mark.parametrize("precision", ["bf16"])
def test_sixteen_bits_train(precision):
    here, there = pair(precision=precision)
    optimizers = [torch.optim.SGD(here.parameters(), lr=0.1),
                  attnd.torch.optimizer(torch.optim.SGD(there.parameters(), lr=0.1))]
    tokens, targets = data(5)
    for step in range(5):
        losses = []
        for model, optimizer in zip((here, there), optimizers):
            optimizer.zero_grad()
            loss = loss_of(model, tokens[step], targets[step])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert 0 < abs(losses[1] - losses[0]) < 0.02, step
    check_states(here, there, 0.01)


def test_frozen_parameters_stay():
    here, there = pair()
    for model in (here, there):
        for name, tensor in model.encoder.named_parameters():
            tensor.requires_grad_("linear" in name)
    optimizers = [torch.optim.SGD(here.parameters(), lr=0.1),
                  attnd.torch.optimizer(torch.optim.SGD(there.parameters(), lr=0.1))]
    tokens, targets = data()
    for model, optimizer in zip((here, there), optimizers):
        loss_of(model, tokens[0], targets[0]).backward()
        optimizer.step()
    check_states(here, there, 1e-6)


def test_single_layer_and_pieces_keep_their_names():
    pieces = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    for layer in (nn.TransformerEncoderLayer(16, 2, 24, 0.0), pieces):
        here, there = copy.deepcopy(layer), attnd.torch.offload(layer)
        x = torch.randn(5, 2, 16)
        torch.testing.assert_close(there(x), here(x), rtol=1e-5, atol=1e-5)
        assert set(there.state_dict()) == set(here.state_dict())
        other = {name: tensor + 0.5 for name, tensor in here.state_dict().items()}
        there.load_state_dict(other)
        here.load_state_dict(other)
        torch.testing.assert_close(there(x), here(x), rtol=1e-5, atol=1e-5)


def test_stack_that_is_gone_gives_its_module_back(daemon):
    gc.collect()
    before = daemon.metric("attnd_modules")
    _, there = pair()
    there(data()[0][0])
    assert daemon.metric("attnd_modules") == before + 1
    del there
    gc.collect()
    assert daemon.metric("attnd_modules") == before


def test_calls_of_modules_count_for_their_caller(daemon):
    def used():
        return [daemon.metric(f"attnd_caller_{name}") for name in
                ("requests_total", 'bytes_total{.*"received"}', 'bytes_total{.*"sent"}', "compute_seconds_total")]
    _, there = pair()
    before = used()
    x = data()[0][0]
    there(x)
    requests, received, sent, compute = np.subtract(used(), before)
    assert requests >= 2 and received >= x.nbytes and sent >= x.nbytes and compute > 0  # Register, Forward


def test_more_rows_than_before_keep_the_state():
    here, there = pair()
    optimizers = [torch.optim.AdamW(here.parameters(), lr=1e-2),
                  attnd.torch.optimizer(torch.optim.AdamW(there.parameters(), lr=1e-2))]
    for length in (4, 6, 9):
        tokens, targets = data(length=length)
        for model, optimizer in zip((here, there), optimizers):
            optimizer.zero_grad()
            loss_of(model, tokens[0], targets[0]).backward()
            optimizer.step()
    check_states(here, there, 2e-5)


def test_unsupported_optimizers_and_layers_raise_at_wrap():
    _, there = pair()
    with pytest.raises(TypeError, match="RMSprop"):
        attnd.torch.optimizer(torch.optim.RMSprop(there.parameters()))
    with pytest.raises(TypeError, match="Conv1d"):
        attnd.torch.offload(nn.ModuleList([nn.Conv1d(16, 16, 1)]))
    layer = nn.TransformerEncoderLayer(16, 2, 24)
    with pytest.raises(TypeError, match="share"):
        attnd.torch.offload(nn.ModuleList([layer, layer]))


def test_double_backward_raises():
    _, there = pair()
    x = torch.randn(1, 4, 16, requires_grad=True)
    with pytest.raises(attnd.Unimplemented, match="create_graph"):
        torch.autograd.grad(there.encoder(x).sum(), x, create_graph=True)


def test_killed_daemon_in_the_midst_of_training_changes_nothing(own_daemon, daemon):
    states = []
    for where in (daemon, own_daemon):
        attnd.torch.connect(where.address, timeout=60, wait_for_ready=True)
        torch.manual_seed(7)
        _, model = pair(dropout=0.1)
        optimizer = attnd.torch.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        tokens, targets = data(6)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, tokens[step], targets[step])
            if where is own_daemon and step in (2, 4):
                own_daemon.kill()
                own_daemon.start()
            loss.backward()
            optimizer.step()
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        np.testing.assert_array_equal(states[1][name].numpy(), tensor.numpy(), err_msg=name)


TRANSFORMERS = {"Bert": {}, "GPT2": {}, "Llama": {"num_key_value_heads": 1},
                "Gemma2": {"sliding_window": 3, "head_dim": 8, "num_key_value_heads": 1}}


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_transformers_models_run_with_their_masks(daemon, kind):
    transformers = pytest.importorskip("transformers")
    import attnd.transformers
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=20,
        max_position_embeddings=64, **TRANSFORMERS[kind])
    here = getattr(transformers, f"{kind}Model")(config).eval()
    there = copy.deepcopy(here)
    attnd.transformers.offload(there, daemon.address)
    tokens = torch.randint(1, 20, (2, 7))
    padding = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    with torch.no_grad():
        for mask in (None, padding):
            ours, theirs = [model(tokens, attention_mask=mask).last_hidden_state for model in (there, here)]
            seen = slice(None) if mask is None else mask.bool()
            torch.testing.assert_close(ours[seen], theirs[seen], rtol=1e-4, atol=1e-5)
    states, gradients = [], []
    for model in (here, there):
        model.zero_grad()
        found = model(tokens, output_hidden_states=True).hidden_states
        sum(state.square().mean() * (n + 1) for n, state in enumerate(found)).backward()
        states.append(found)
        gradients.append(model.get_input_embeddings().weight.grad)
    assert len(states[0]) == len(states[1]) == 3
    for one, other in zip([*states[0], gradients[0]], [*states[1], gradients[1]]):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)
    for model in (there, there.base_model):
        with pytest.raises(attnd.Unimplemented, match="output_attentions"):
            model(tokens, output_attentions=True)
    assert set(there.state_dict()) == set(here.state_dict())


def turned(model, embeddings, positions):
    """The states behind the layers, called by hand with rotary embeddings of each."""
    state = model.get_input_embeddings()(torch.arange(9)[None])
    for layer, given in zip(model.layers, embeddings):
        state = layer(state, position_ids=positions, position_embeddings=given)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_embeddings_that_the_daemon_does_not_make_are_refused(daemon, dtype):
    transformers = pytest.importorskip("transformers")
    import attnd.transformers
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                                      vocab_size=20, initializer_range=0.5)
    here = transformers.LlamaModel(config).to(dtype)
    there = copy.deepcopy(here)
    attnd.transformers.offload(there, daemon.address)
    positions = torch.arange(500, 509)[None]
    made, others = [there.rotary_emb(torch.ones(1, 9, 16, dtype=dtype), at) for at in (positions, positions * 3)]
    ours = turned(there, [made, made], positions).clone()
    if dtype == torch.float32:  # a model of 16 bits has rounded its frequencies
        torch.testing.assert_close(ours, turned(here, [made, made], positions), rtol=1e-3, atol=1e-4)
    for given, at in (([others, others], positions), ([made, others], positions), ([made, made], None)):
        with pytest.raises(attnd.Unimplemented, match="position_embeddings"):
            turned(there, given, at)
    there.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(attnd.Unimplemented, match="position_embeddings"):
        there(torch.arange(9)[None])


def test_transformers_trainer_clips_steps_and_saves_remote_layers(daemon, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import attnd.transformers
    rows = torch.randint(0, 50, (32, 12))
    examples = [{"input_ids": row, "labels": row.sum() % 2} for row in rows]

    def train(model, *optimizers):
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=8, num_train_epochs=2, learning_rate=1e-3,
            max_grad_norm=0.05, logging_steps=1, report_to=[], use_cpu=True, seed=3, disable_tqdm=True)
        trainer = transformers.Trainer(model=model, args=options, train_dataset=examples,
                                       optimizers=optimizers or (None, None))
        trainer.train()
        return [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]

    here = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    there = copy.deepcopy(here)
    expected = train(here, torch.optim.AdamW(here.parameters(), lr=1e-3), None)
    attnd.transformers.offload(there, daemon.address, wait_for_ready=True, timeout=60, max_rows=1024)
    with pytest.raises(TypeError, match=r"attnd.torch.optimizer\(AdamW"):
        train(there)
    there.zero_grad()
    found = train(there, attnd.torch.optimizer(torch.optim.AdamW(there.parameters(), lr=1e-3)), None)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    check_states(here, there, 1e-4)


def test_example_ends_with_the_local_loss_though_its_daemon_is_killed():
    sys.path.insert(0, os.path.join(ROOT, "client/python/examples"))
    import train_modules
    settings = train_modules.Settings(steps=10, length=16, batch=2)
    with open(os.path.join(ROOT, "LICENSE"), encoding="utf-8") as file:
        text = file.read()
    own = train_modules.Daemon(SERVER, "cpu")
    try:
        here, _ = train_modules.train(settings, text, True, False)
        there, _, _ = train_modules.train_there(settings, text, True, own, 5, "")
        np.testing.assert_allclose(there, here, rtol=0, atol=1e-5)
        _, _, moved = train_modules.train_there(settings, text, False, own, None, "")
        assert 1 < moved / (4 * 2 * 16 * 32 * 4) < 1.15  # headers and tokens beside the tensors
    finally:
        own.stop()


def test_new_weights_begin_anew_where_the_state_was_lost(own_daemon):
    """Also while the output of a call that was not computed before the loss is still somebody's."""
    attnd.torch.connect(own_daemon.address, timeout=60, wait_for_ready=True)
    try:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(2))
        weights = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
        x = torch.randn(2, 5, 16)
        expected = layers[1](layers[0](x)).detach()
        stack = attnd.torch.offload(layers, replay_mib=0)
        assert torch.allclose(stack[1](stack[0](x)), expected, atol=1e-5)
        waiting = stack[1](stack[0](x))
        own_daemon.kill()
        own_daemon.start()
        with pytest.raises(attnd.FailedPrecondition) as lost:
            stack[1](stack[0](x)).sum().backward()
        assert lost.value.reason == "STATE_LOST"
        stack.load_state_dict(weights)
        assert torch.allclose(stack[1](stack[0](x)), expected, atol=1e-5)
        with pytest.raises(attnd.FailedPrecondition):
            waiting.sum()
    finally:
        attnd.torch.disconnect()
