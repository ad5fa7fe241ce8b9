"""Layouts made of PyTorch's and transformers' layers, by the float64 reference against the layers themselves in float64."""
import os
import subprocess

import numpy as np
import pytest
from conftest import ROOT

torch = pytest.importorskip("torch")
import torch.ao.nn.quantizable  # noqa: E402
from torch import nn  # noqa: E402

from attnd import _protobuf as wire  # noqa: E402
from attnd.modules.layers import Variant  # noqa: E402
from attnd.modules.stack import layout_of  # noqa: E402

REFERENCE = os.path.join(ROOT, "bazel-bin/tests/fixtures/module_reference")


def encoder(**options):
    return nn.TransformerEncoderLayer(**{"d_model": 16, "nhead": 2, "dim_feedforward": 24, "dropout": 0.0,
                                         "batch_first": True, **options})


NN = {
    "encoder_post_relu": lambda: [encoder()],
    "encoder_pre_gelu": lambda: [encoder(norm_first=True, activation="gelu"), encoder(norm_first=True, activation="gelu")],
    "encoder_without_bias": lambda: [encoder(bias=False, layer_norm_eps=1e-3)],
    "encoder_tanh_gelu": lambda: [encoder(activation=nn.GELU(approximate="tanh"))],
    "pieces": lambda: [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 40), nn.SiLU(), nn.Linear(40, 16, bias=False)),
                       nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-5)],
    "nested": lambda: [nn.Sequential(nn.Sequential(nn.Linear(16, 24), nn.Tanh()), nn.Linear(24, 16), nn.Identity())],
}


def randomise(layers, rng):
    for layer in layers:
        layer.double().train()
        with torch.no_grad():
            for tensor in layer.parameters():
                tensor.copy_(torch.from_numpy(rng.normal(size=tuple(tensor.shape)) * (0.3 if tensor.dim() == 2 else 1.0)))


def reference_results(folder, layout, weights, x, dy, rows, mask_bits=b"", memory=None):
    """y, dx and, with a memory, d_memory by their names; the gradients of the layout's parameters. rows: of the call."""
    flat = np.concatenate([weight.ravel() for weight in weights])
    for name, data in (("layout.pb", layout.serialize()), ("forward.pb", wire.message(3, rows)), ("mask_bits", mask_bits),
                       ("memory", b"" if memory is None else memory.tobytes()), ("weights", flat.tobytes()),
                       ("x", x.tobytes()), ("dy", dy.tobytes())):
        (folder / name).write_bytes(data)
    subprocess.run([REFERENCE, "run", str(folder)], check=True)
    found = {name: np.fromfile(folder / name).reshape(x.shape) for name in ("y", "dx")}
    if memory is not None:
        found["d_memory"] = np.fromfile(folder / "d_memory").reshape(memory.shape)
    ends = np.cumsum([weight.size for weight in weights])[:-1]
    parts = np.split(np.fromfile(folder / "gradients"), ends)
    return found, [part.reshape(weight.shape) for part, weight in zip(parts, weights)]


def check_layers(layers, tmp_path, rng, call, variant=Variant(), batch=2, length=5, rtol=1e-6):
    layout = layout_of([(n, layer.float()) for n, layer in enumerate(layers)], variant)
    randomise(layers, rng)
    x, dy = [rng.normal(size=(batch, length, layout.width)) for _ in range(2)]
    names = [parameter.name.split(".", 1) for parameter in layout.parameters]
    tensors = [layers[int(n)].get_parameter(name) for n, name in names]
    found, gradients = reference_results(tmp_path, layout, [tensor.detach().numpy() for tensor in tensors], x, dy,
                                         wire.number(1, batch) + wire.number(2, length))
    value = tx = torch.tensor(x, requires_grad=True)
    for layer in layers:
        value = call(layer, value)
    value.backward(torch.tensor(dy))
    compare("y", found["y"], value.detach().numpy(), rtol)
    compare("dx", found["dx"], tx.grad.numpy(), rtol)
    for name, gradient, tensor in zip(names, gradients, tensors):
        compare(".".join(name), gradient, tensor.grad.numpy(), rtol)


def compare(name, found, expected, rtol):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=10 * rtol * max(1, np.abs(expected).max()), err_msg=name)


@pytest.mark.parametrize("name", NN)
def test_torch_layers(name, tmp_path, rng):
    check_layers(NN[name](), tmp_path, rng, lambda layer, value: layer(value))


def test_torch_attention_alone(tmp_path, rng):
    check_layers([nn.MultiheadAttention(16, 2, batch_first=True)], tmp_path, rng,
                 lambda layer, value: layer(value, value, value, need_weights=False)[0])


def test_causal_encoder(tmp_path, rng):
    mask = nn.Transformer.generate_square_subsequent_mask(5).double()
    check_layers([encoder()], tmp_path, rng, lambda layer, value: layer(value, src_mask=mask), Variant(causal=True))


SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=20,
             max_position_embeddings=64)
PLAIN = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
GROUPED = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
MODELS = {  # the model's configuration and more of it
    "bert": ("Bert", PLAIN), "roberta": ("Roberta", PLAIN), "bert_gelu_new": ("Bert", {**PLAIN, "hidden_act": "gelu_new"}),
    "gpt2": ("GPT2", dict(resid_pdrop=0.0, attn_pdrop=0.0, n_inner=24)),
    "gpt2_by_layer": ("GPT2", dict(resid_pdrop=0.0, attn_pdrop=0.0, scale_attn_by_inverse_layer_idx=True)),
    "llama": ("Llama", GROUPED), "llama_bias": ("Llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama3_rope": ("Llama", {**GROUPED, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "mistral_window": ("Mistral", {**GROUPED, "sliding_window": 3}), "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", GROUPED), "gemma": ("Gemma", GROUPED),
    "gemma2": ("Gemma2", {**GROUPED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, "sliding_window": 3}),
    "gemma3": ("Gemma3", {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": 3}),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_layers(name, tmp_path, rng):
    transformers = pytest.importorskip("transformers")
    kind, options = MODELS[name]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    config = config_class(**{**SIZES, **options}, attn_implementation="eager")
    model = getattr(transformers, f"{kind}TextModel" if kind == "Gemma3" else f"{kind}Model")(config).double()
    layers = list(getattr(model, "layers", None) or getattr(model, "h", None) or model.encoder.layer)
    causal = kind not in ("Bert", "Roberta")

    def call(layer, value):
        attention = getattr(layer, "self_attn", None)
        window = getattr(attention, "sliding_window", None) or (3 if name == "mistral_window" else None)
        near = torch.ones(5, 5, dtype=torch.bool).tril()
        near = near & ~torch.ones(5, 5, dtype=torch.bool).tril(-window) if window else near
        mask = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~near, torch.finfo(torch.float64).min)[None, None]
        arguments = {"attention_mask": mask} if causal else {}
        if hasattr(model, "rotary_emb"):
            positions = torch.arange(5)[None]
            kinds = (attention.layer_type,) if name == "gemma3" else ()
            arguments["position_embeddings"] = model.rotary_emb(value, positions, *kinds)
        found = layer(value, **arguments)
        return found[0] if isinstance(found, tuple) else found
    check_layers(layers, tmp_path, rng, call, rtol=2e-5)  # its norms are computed in float32


class OtherBlock(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return 2 * super()._ff_block(x)


class OtherCall(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def with_one_of_its_own(**parts):
    layer = encoder()
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


def llama(change):
    """A layer of it, after a change."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{"vocab_size": 8, "hidden_size": 16, "num_attention_heads": 2,
                                         "intermediate_size": 24, "num_hidden_layers": 1})
    layer = transformers.LlamaModel(config).layers[0]
    change(layer)
    return layer


def other_attention():
    from transformers.models.mistral import modeling_mistral
    return modeling_mistral.MistralAttention(modeling_mistral.MistralConfig(
        vocab_size=8, hidden_size=16, num_attention_heads=2, num_key_value_heads=2), 0)


def another_of_its_name(layer):
    class LlamaDecoderLayer(type(layer)):
        def forward(self, hidden_states, **_):
            return 2 * hidden_states
    layer.__class__ = LlamaDecoderLayer


UNSUPPORTED = {
    "block": (lambda: OtherBlock(16, 2, 24, 0.0), "_ff_block of its own"),
    "blocks_instance": (lambda: with_one_of_its_own(_sa_block=lambda x, *_, **__: x), "_sa_block of its own"),
    "call": (lambda: OtherCall(16, 16), "a Sequential there can be"),
    "call_inside": (lambda: with_one_of_its_own(linear1=OtherCall(16, 24)), "linear1 is a OtherCall with a __call__"),
    "quantized": (lambda: with_one_of_its_own(self_attn=torch.ao.nn.quantizable.MultiheadAttention(16, 2)),
                  "self_attn.*expected an nn.MultiheadAttention"),
    "name_of_a_model": (lambda: llama(another_of_its_name), "expected nn.TransformerEncoderLayer"),
    "attention_of_another_model": (lambda: llama(lambda layer: setattr(layer, "self_attn", other_attention())),
                                   "self_attn is a MistralAttention, of another model"),
    "norm_of_a_model": (lambda: llama(lambda layer: setattr(layer, "input_layernorm", nn.LayerNorm(16, bias=False))),
                        "input_layernorm: expected a LlamaRMSNorm"),
    "bias_k": (lambda: nn.MultiheadAttention(16, 2, add_bias_kv=True), "add_bias_kv"),
    "zero_attn": (lambda: nn.MultiheadAttention(16, 2, add_zero_attn=True), "add_zero_attn"),
    "kdim": (lambda: nn.MultiheadAttention(16, 2, kdim=8, vdim=8), "kdim"),
    "convolution": (lambda: nn.Conv1d(16, 16, 1), "Conv1d"),
    "pieces": (lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), "BatchNorm1d"),
    "width": (lambda: nn.Linear(16, 8), "input's columns"),
    "activation": (lambda: encoder(activation=nn.functional.softplus), "softplus"),
    "dropout": (lambda: encoder(dropout=1.0), "dropout"),
    "double": (lambda: encoder().double(), "float64"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_layers_raise_type_error(name):
    made, told = UNSUPPORTED[name]
    with pytest.raises(TypeError, match=told):
        layout_of([(0, made())], Variant())


def test_hooks_inside_are_refused():
    layer = encoder()
    layer.linear1.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="hooks"):
        layout_of([(0, layer)], Variant())
