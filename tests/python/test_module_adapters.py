"""LoRA by PEFT in layers on a daemon: adapters made before offload and after it, trained there or here, several of them; and
parameters that come and go."""
import copy

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
from module_actions import Net  # noqa: E402
from torch import nn  # noqa: E402

import attnd  # noqa: E402
import attnd.torch  # noqa: E402


@pytest.fixture(autouse=True)
def connected(daemon):
    attnd.torch.connect(daemon.address, timeout=60, wait_for_ready=True)
    yield
    attnd.torch.disconnect()


def net():
    return Net(2), lambda made: made(torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))), r"layers\.\d\.[03]"


def encoder():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    return Encoder(), lambda made: made(x), ["linear1", "linear2"]


def tiny(name):
    transformers = pytest.importorskip("transformers")
    kind = {"bert": "Bert", "gpt2": "GPT2", "llama": "Llama"}[name]
    sizes = {"bert": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
                          hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
             "gpt2": dict(n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
             "llama": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                           intermediate_size=48)}[name]
    config = getattr(transformers, f"{kind}Config")(vocab_size=40, use_cache=False, **sizes)
    ids = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(2))
    targets = {"bert": ["query", "value", "dense"], "gpt2": ["c_attn", "c_fc", "c_proj"],
               "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}[name]
    return getattr(transformers, f"{kind}Model")(config), lambda made: made(ids).last_hidden_state, targets


MODELS = {"net": net, "encoder": encoder, **{name: lambda name=name: tiny(name) for name in ("bert", "gpt2", "llama")}}


def offload(model, mode):
    """All stacks of layers in it."""
    for owner in list(model.modules()):
        for name, child in owner.named_children():
            if name in ("layers", "layer", "h") and isinstance(child, nn.ModuleList):
                setattr(owner, name, attnd.torch.offload(child, optimizer=mode))
    return model


def adapt(model, targets, **options):
    torch.manual_seed(4)  # the same adapters, which change something from the beginning
    return peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False,
                                                      **options))


def optimizer_of(model, mode):
    made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
    return attnd.torch.optimizer(made) if mode == "server" else made


def train(run, model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        y = run(model)
        (y - torch.linspace(-1, 1, y.numel()).reshape(y.shape)).square().mean().backward()
        optimizer.step()


def same(one, other):  # a step moves by up to 1e-2, and Adam makes the rounding of a gradient near 0 larger
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=2e-4, atol=3e-4, msg=lambda text: f"{name}: {text}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["before", "after", "after a step"])
@pytest.mark.parametrize("mode", ["server", "local"])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_trained_as_here(name, mode, order):
    torch.manual_seed(3)
    model, run, targets = MODELS[name]()
    here, there = model, copy.deepcopy(model)
    if order != "before":
        offload(there, mode)
    if order == "after a step":
        train(run, here, optimizer_of(here, "local"), 1)
        train(run, there, optimizer_of(there, mode), 1)
        here.zero_grad()
        there.zero_grad()
    here, there = adapt(here, targets), adapt(there, targets)
    if order == "before":
        offload(there, mode)
    train(run, here, optimizer_of(here, "local"))
    train(run, there, optimizer_of(there, mode))
    torch.testing.assert_close(run(there), run(here), rtol=2e-4, atol=3e-4)
    same(here.state_dict(), there.state_dict())
    same(peft.get_peft_model_state_dict(here), peft.get_peft_model_state_dict(there))


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_added_chosen_scaled_deleted_and_merged_as_here():
    torch.manual_seed(3)
    model, run, targets = net()
    here, there = adapt(model, targets), None
    there = copy.deepcopy(here)
    offload(there, "server")
    optimizers = [optimizer_of(here, "local"), optimizer_of(there, "server")]
    models = (here, there)

    def each(act):
        for model in models:
            torch.manual_seed(8)
            act(model)
        for model, optimizer in zip(models, optimizers):
            train(run, model, optimizer, 1)
            optimizer.zero_grad()
        torch.testing.assert_close(run(there), run(here), rtol=2e-4, atol=3e-4)
        same(here.state_dict(), there.state_dict())

    def scale(model):
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.set_scale("default", 0.5)
    each(scale)
    each(lambda model: model.add_adapter("other", peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)))
    each(lambda model: model.set_adapter("other"))
    for model, optimizer in zip(models, optimizers):
        optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if "other" in n], "lr": 3e-3})
    each(lambda model: None)
    each(lambda model: model.set_adapter("default"))  # whose moments have waited
    each(lambda model: model.base_model.set_adapter(["default", "other"]))
    each(lambda model: model.delete_adapter("other"))
    with there.disable_adapter(), pytest.raises(TypeError, match="disabled: for the model without them"):
        run(there)
    with pytest.raises(attnd.Unimplemented, match="local_weights"):
        there.merge_adapter()
    scale(there)
    merged = [here.merge_and_unload(), None]
    with attnd.torch.local_weights(there):
        merged[1] = there.merge_and_unload()
    torch.testing.assert_close(run(merged[1]), run(merged[0]), rtol=2e-4, atol=3e-4)
    same(merged[0].state_dict(), merged[1].state_dict())


@pytest.mark.filterwarnings("ignore")
def test_what_no_layout_has_is_refused_by_name():
    model, run, targets = net()
    with pytest.raises(TypeError, match="DoRA"):
        offload(adapt(model, targets, use_dora=True), "server")
    model, run, targets = net()
    made = peft.get_peft_model(model, peft.IA3Config(target_modules=targets, feedforward_modules=[]))
    with pytest.raises(TypeError, match="merge_and_unload"):
        offload(made, "server")
    model, run, _ = encoder()
    with pytest.raises(TypeError, match="out_proj"):
        offload(adapt(model, ["out_proj"]), "server")
