"""The errors of offloaded layers beside PyTorch's own in the same element, both against float64: y, dx and each gradient of
PyTorch's and transformers' layers, pre and post norm, with masks. ATTND_TEST_WIDTH=768 makes them as wide as BERT's."""
import copy
import os
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from test_module_layouts import reference_results  # noqa: E402

import attnd.torch  # noqa: E402
from attnd.modules import chain, stack  # noqa: E402
from attnd.modules.layers import Variant  # noqa: E402
from attnd.modules.parts import Parts  # noqa: E402
from attnd.modules import Module  # noqa: E402

pytestmark = pytest.mark.usefixtures("connected")
WIDTH = int(os.environ.get("ATTND_TEST_WIDTH", "64"))
HEADS, LENGTH, LAYERS, KEPT = WIDTH // 16, 13 * WIDTH // 64, 2, (13 * WIDTH // 64, 9)
ELEMENTS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
MOST = 2.0


def exact_results(folder, layers, sent, memory, x, dy):
    """By name, of the float64 reference on the call that was sent."""
    named, variant = list(enumerate(layers)), Variant(sent.causal)
    layout = stack.layout_of(named, variant)
    parts = Parts([f"{n}." for n, _ in named], stack.describe_all(named, variant))
    rows, bits = Module._rows(None, x.shape, sent.kv_lengths, None if sent.mask is None else sent.mask.numpy(), None, None)
    if memory is not None:
        rows += Module._memory_rows(types.SimpleNamespace(layout=layout), x.shape, memory.numpy(), sent.memory_lengths, None,
                                    False)
    tensors = {f"{n}.{name}": one.detach().double().numpy() for n, layer in named for name, one in layer.named_parameters()}
    cut = {own: part for name, array in tensors.items() for own, part in parts._cut(name, array)}
    found, gradients = reference_results(
        folder, layout, [cut[parameter.name] for parameter in layout.parameters], x.double().numpy(), dy.double().numpy(),
        rows, b"" if bits is None else bits.tobytes(), None if memory is None else memory.double().numpy())
    by_name = {parameter.name: gradient for parameter, gradient in zip(layout.parameters, gradients)}
    return {**found, **{name: parts._whole(name, by_name) for name in tensors}}


def results(layers, call, x, memory, dy, dtype):
    inputs = [one.to(dtype, copy=True).requires_grad_() for one in (x, memory) if one is not None]
    value = inputs[0]
    for layer in layers:
        value = call(layer, value, *inputs[1:])
        value = value[0] if isinstance(value, tuple) else value
    value.backward(dy.to(dtype))
    return {"y": value.detach(), **{name: one.grad for name, one in zip(("dx", "d_memory"), inputs)},
            **{name: one.grad for name, one in layers.named_parameters()}}


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    def check(layers, element, call, memory_rows=0):
        """call(layer, value, *memory) is a layer's result."""
        dtype, random = ELEMENTS[element], torch.Generator().manual_seed(7)
        x, dy = torch.randn(2, 2, LENGTH, WIDTH, generator=random).to(dtype).float()
        memory = torch.randn(2, memory_rows, WIDTH, generator=random).to(dtype).float() if memory_rows else None
        with torch.no_grad():
            for tensor in (tensor for layer in layers for tensor in layer.parameters()):
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
            for layer in layers:
                if getattr(layer, "activation", None) is nn.functional.relu:  # rounding must not carry its inputs over 0
                    signs = torch.randn(layer.linear1.bias.shape, generator=random).sign()
                    layer.linear1.bias.copy_(signs * WIDTH ** 0.5)
            for tensor in (tensor for layer in layers for tensor in layer.parameters()):
                tensor.copy_(tensor.to(dtype).float())
        sent, adapt = [], chain.adapt
        monkeypatch.setattr(chain, "adapt", lambda *arguments: sent.append(adapt(*arguments)) or sent[-1])
        remote = attnd.torch.offload(nn.ModuleList(copy.deepcopy(layers)), optimizer="local",
                                     precision=None if element == "f32" else element)
        ours = results(remote, call, x, memory, dy, torch.float32)
        theirs = results(nn.ModuleList(copy.deepcopy(layers)).to(dtype), call, x, memory, dy, dtype)
        exact = exact_results(tmp_path, layers, sent[0], memory, x, dy)
        squares, largest = {}, max(np.square(one).mean() for one in exact.values())
        for name, expected in exact.items():  # a tensor of all layers is one: few numbers say little
            mine, other = [np.square(found[name].double().numpy() - expected).sum() for found in (ours, theirs)]
            # The gradient of the keys' bias is nothing but roundings of what cancels: its rounding in one unit.
            floor = (torch.finfo(dtype).eps / 4) ** 2 * max(np.square(expected).sum(), largest * expected.size / 64)
            squares.setdefault(name.lstrip("0123456789."), []).append((mine, max(other, floor)))
        ratios = {name: float(np.sqrt(np.divide(*np.sum(pairs, 0)))) for name, pairs in squares.items()}
        worst = max(ratios, key=ratios.get)
        with capsys.disabled():
            print(f"\nerrors over PyTorch's: median {np.median(list(ratios.values())):.2f}, {worst} {ratios[worst]:.2f}")
        assert all(ratio <= MOST for ratio in ratios.values()), ratios
    return check


# ---- torch.nn. True hides.

def padding(rows=LENGTH, kept=KEPT):
    return torch.arange(rows) >= torch.tensor(kept)[:, None]


def later(rows=LENGTH):
    return torch.ones(rows, rows, dtype=torch.bool).triu(1)


def some():
    return (torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.6).fill_diagonal_(False)


OPTIONS = {"post": {}, "pre": {"norm_first": True, "activation": "gelu"}}
MASKS = {"no mask": {}, "causal": {"src_mask": later()}, "lengths": {"src_key_padding_mask": padding()},
         "bits": {"src_mask": some()}, "both": {"src_mask": some(), "src_key_padding_mask": padding()}}


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("norm", OPTIONS)
def test_encoder_layers(check, norm, mask, element):
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, batch_first=True, **OPTIONS[norm]).eval()
              for _ in range(LAYERS)]
    check(layers, element, lambda layer, value: layer(value, **MASKS[mask]))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("norm", OPTIONS)
def test_decoder_layers(check, norm, element):
    layers = [nn.TransformerDecoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, batch_first=True, **OPTIONS[norm]).eval()
              for _ in range(LAYERS)]
    check(layers, element, lambda layer, value, memory: layer(value, memory, tgt_mask=later(), tgt_is_causal=True,
                                                              memory_key_padding_mask=padding(11, (11, 6))), 11)


@pytest.mark.parametrize("element", ELEMENTS)
def test_attention_alone(check, element):
    check([nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)], element, lambda layer, value: layer(
        value, value, value, key_padding_mask=padding(), need_weights=False))


@pytest.mark.parametrize("element", ELEMENTS)
def test_pieces(check, element):
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH)),
              nn.Sequential(nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    check(layers, element, lambda layer, value: layer(value))


# ---- transformers

GROUPED = {"num_key_value_heads": HEADS // 2, "head_dim": 16}
NEAR = {**GROUPED, "sliding_window": 5}
MODELS = {"bert": ("Bert", {}), "roberta": ("Roberta", {}), "gpt2": ("GPT2", {}), "llama": ("Llama", GROUPED),
          "mistral": ("Mistral", NEAR), "qwen2": ("Qwen2", GROUPED), "qwen3": ("Qwen3", GROUPED),
          "gemma": ("Gemma", GROUPED),
          "gemma2": ("Gemma2", {**NEAR, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
          "gemma3": ("Gemma3", {**NEAR, "query_pre_attn_scalar": 16})}


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_layers(check, name, element):
    transformers = pytest.importorskip("transformers")
    kind, options = MODELS[name]
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, vocab_size=20,
        max_position_embeddings=LENGTH, **options, attn_implementation="eager")
    model = getattr(transformers, f"{kind}{text}Model")(config).eval()
    both_ways = kind in ("Bert", "Roberta")

    def call(layer, value):
        attention = getattr(layer, "self_attn", None)
        window = getattr(attention, "sliding_window", None) or (5 if kind == "Mistral" else LENGTH)
        seen = ~padding()[:, None, None, :] if both_ways else ~later() & ~torch.ones(LENGTH, LENGTH).tril(-window).bool()
        given = {"attention_mask": torch.zeros(2, 1, LENGTH, LENGTH, dtype=value.dtype).masked_fill(
            ~seen, torch.finfo(value.dtype).min)}
        if hasattr(model, "rotary_emb"):
            kinds = (attention.layer_type,) if kind == "Gemma3" else ()
            given["position_embeddings"] = model.rotary_emb(value, torch.arange(LENGTH)[None], *kinds)
        return layer(value, **given)
    check(list(getattr(model, "layers", None) or getattr(model, "h", None) or model.encoder.layer), element, call)
