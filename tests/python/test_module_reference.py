"""The reference of modules against published formulas in NumPy, and against PyTorch's own layers and optimizers where it is
installed. Layouts are made from module.proto with protoc, as any caller may."""
import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip("google.protobuf")
REFERENCE = os.path.join(ROOT, "bazel-bin/tests/fixtures/module_reference")


@pytest.fixture(scope="module")
def pb(tmp_path_factory):
    """The messages of module.proto, beside the package attnd as docs/numpy.md says."""
    made = tmp_path_factory.mktemp("generated")
    protos = [f"attnd/v1/{name}.proto" for name in ("module", "attention", "capture", "mask")]
    subprocess.run(["protoc", "-I.", f"--python_out={made}", *protos], cwd=os.path.join(ROOT, "proto"), check=True)
    import attnd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attnd, "__path__", [*attnd.__path__, os.path.join(made, "attnd")])
        yield importlib.import_module("attnd.v1.module_pb2")
        for name in [name for name in sys.modules if name.startswith("attnd.v1")]:
            del sys.modules[name]


class Stack:
    """A layout of one block, written op by op; its weights are drawn in the order of the table."""

    def __init__(self, pb, width, layers=1, element=3, memory_width=0, seed=0):
        self.pb, self.random, self.shapes = pb, np.random.default_rng(seed), []
        self.layout = pb.ModuleLayout(version=1, width=width, element=element, parameter_element=3,
                                      memory_width=memory_width)
        self.block, self.layers = self.layout.block.add(), layers
        for n in range(layers):
            self.layout.layer.add(prefix=f"{n}.")

    def parameter(self, *shape):
        self.block.parameter.add(name=f"p{len(self.shapes)}", shape=shape)
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def op(self, **kind):
        self.block.op.add(**kind)
        return len(self.block.op) + 1

    def linear(self, value, inner, outer, bias=True, transposed=False):
        weight = self.parameter(*((inner, outer) if transposed else (outer, inner)))
        made = self.pb.Linear(input=value, weight=weight, transposed=transposed)
        if bias:
            made.bias = self.parameter(outer)
        return self.op(linear=made)

    def norm(self, value, columns, kind, epsilon=1e-5, bias=True, **options):
        made = self.pb.Norm(input=value, kind=kind, epsilon=epsilon, weight=self.parameter(columns), **options)
        if bias:
            made.bias = self.parameter(columns)
        return self.op(norm=made)

    def add(self, a, b):
        return self.op(binary=self.pb.Binary(kind=1, a=a, b=b))

    def draw(self):
        self.weights = [[self.random.normal(size=shape) * (0.3 if len(shape) == 2 else 1) for shape in self.shapes]
                        for _ in range(self.layers)]
        return self.weights

    def run(self, folder, x, dy, memory=(), bits=b"", training=False, rounding="exact", **rows):
        """y, dx, d_memory and the gradients, one list for each layer."""
        header = self.pb.ModuleForwardHeader(rows=self.pb.Rows(**rows), training=training, seed=11, offset=3)
        write(folder, "layout.pb", self.layout.SerializeToString())
        write(folder, "forward.pb", header.SerializeToString())
        write(folder, "mask_bits", bits)
        flat = np.concatenate([w.ravel() for layer in self.weights for w in layer])
        for name, numbers in (("weights", flat), ("x", x), ("dy", dy), ("memory", np.asarray(memory, np.float64))):
            write(folder, name, np.ascontiguousarray(numbers, dtype=np.float64).tobytes())
        subprocess.run([REFERENCE, "run", str(folder)], check=True, env={"ATTND_MODULE_ROUNDING": rounding})
        y, dx, d_memory, gradients = [np.fromfile(folder / name) for name in ("y", "dx", "d_memory", "gradients")]
        parts, at = [], 0
        for _ in range(self.layers):
            parts.append([])
            for shape in self.shapes:
                parts[-1].append(gradients[at:at + np.prod(shape)].reshape(shape))
                at += np.prod(shape)
        return y.reshape(x.shape), dx.reshape(x.shape), d_memory, parts


def write(folder, name, data):
    (folder / name).write_bytes(data)


def heads(value, first, count, dim):
    return {"value": value, "first_column": first, "heads": count, "dim": dim}


# ---- Layers as models have them.

def encoder_layer(pb, width, head_count, hidden, kind, pre_norm, dropout=0.0, layers=1):
    """torch.nn.TransformerEncoderLayer: packed in_proj, layer norm; activation by its number."""
    s, dim = Stack(pb, width, layers), width // head_count
    x = 0

    def sublayer(value, inner):
        made = inner(s.norm(value, width, 1) if pre_norm else value)
        if dropout:
            made = s.op(dropout=pb.DropoutOp(input=made, p=dropout))
        made = s.add(value, made)
        return made if pre_norm else s.norm(made, width, 1)

    def attention(value):
        packed = s.linear(value, width, 3 * width)
        made = pb.AttentionOp(q=heads(packed, 0, head_count, dim), k=heads(packed, width, head_count, dim),
                              v=heads(packed, 2 * width, head_count, dim))
        if dropout:
            made.options.dropout.p = dropout
        return s.linear(s.op(attention=made), width, width)

    def feed_forward(value):
        made = s.op(activation=pb.Activation(input=s.linear(value, width, hidden), kind=kind))
        return s.linear(made, hidden, width)

    sublayer(sublayer(x, attention), feed_forward)
    return s


def llama_layer(pb, width, q_heads, kv_heads, hidden, frequencies, qk_norm=False, weight_offset=0, layers=1):
    s, dim = Stack(pb, width, layers), width // q_heads
    normed = s.norm(0, width, 2, bias=False, weight_offset=weight_offset)
    q, k, v = [s.linear(normed, width, count * dim, bias=False) for count in (q_heads, kv_heads, kv_heads)]
    made = pb.AttentionOp(q=heads(q, 0, q_heads, dim), k=heads(k, 0, kv_heads, dim), v=heads(v, 0, kv_heads, dim),
                          rotary=pb.Rotary(inverse_frequency=frequencies))
    made.options.causal = True
    if qk_norm:
        made.q_norm, made.k_norm, made.qk_norm_epsilon = s.parameter(dim), s.parameter(dim), 1e-6
    middle = s.add(0, s.linear(s.op(attention=made), width, width, bias=False))
    normed = s.norm(middle, width, 2, bias=False, weight_offset=weight_offset)
    gate = s.op(activation=pb.Activation(input=s.linear(normed, width, hidden, bias=False), kind=4))
    both = s.op(binary=pb.Binary(kind=2, a=gate, b=s.linear(normed, width, hidden, bias=False)))
    s.add(middle, s.linear(both, hidden, width, bias=False))
    return s


# ---- Published formulas.

def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x, weight, bias, epsilon=1e-5):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered ** 2).mean(-1, keepdims=True) + epsilon) * weight + bias


def rms_norm(x, weight, epsilon=1e-5):
    return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + epsilon) * weight


def attend(q, k, v, mask=None):
    """[batch, heads, length, dim]"""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(scores if mask is None else np.where(mask, scores, -np.inf)) @ v


def split(x, count):
    return x.reshape(*x.shape[:-1], count, -1).swapaxes(-2, -3)


def join(x):
    return x.swapaxes(-2, -3).reshape(*x.shape[:-3], x.shape[-2], -1)


def numpy_encoder(x, w, head_count, activation, pre_norm, mask=None):
    def attention(value, p):
        q, k, v = [split(part, head_count) for part in np.split(value @ p[0].T + p[1], 3, -1)]
        return join(attend(q, k, v, mask)) @ p[2].T + p[3]

    def feed_forward(value, p):
        return activation(value @ p[0].T + p[1]) @ p[2].T + p[3]

    if pre_norm:
        x = x + attention(layer_norm(x, *w[0:2]), w[2:6])
        return x + feed_forward(layer_norm(x, *w[6:8]), w[8:12])
    x = layer_norm(x + attention(x, w[0:4]), *w[4:6])
    return layer_norm(x + feed_forward(x, w[6:10]), *w[10:12])


def turned(x, frequencies):
    """x [..., length, dim]; halves, as Llama in transformers."""
    angles = (np.arange(x.shape[-2], dtype=np.float32)[:, None] * np.float32(frequencies)).astype(np.float64)
    c, s = np.cos(angles), np.sin(angles)
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def numpy_llama(x, w, q_heads, kv_heads, frequencies, qk_norm, weight_offset):
    w = list(w)
    normed = rms_norm(x, w.pop(0) + weight_offset)
    q, k, v = [split(normed @ w.pop(0).T, count) for count in (q_heads, kv_heads, kv_heads)]
    if qk_norm:
        q, k = rms_norm(q, w.pop(0), 1e-6), rms_norm(k, w.pop(0), 1e-6)
    q, k = turned(q, frequencies), turned(k, frequencies)
    k, v = [np.repeat(part, q_heads // kv_heads, -3) for part in (k, v)]
    length = x.shape[-2]
    middle = x + join(attend(q, k, v, np.tri(length, dtype=bool))) @ w.pop(0).T
    normed = rms_norm(middle, w.pop(0) + weight_offset)
    gate = normed @ w.pop(0).T
    return middle + (gate / (1 + np.exp(-gate)) * (normed @ w.pop(0).T)) @ w.pop(0).T


def gelu(x):
    import math
    return x * np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2


def data(s, *shape):
    return s.random.normal(size=shape), s.random.normal(size=shape)


def check_slopes(function, x, dy, dx, weights, gradients):
    """Gradients against central differences of the formulas, at one random direction for each tensor."""
    random, step = np.random.default_rng(1), 1e-5
    for tensor, gradient in [(x, dx), *zip((w for layer in weights for w in layer),
                                           (g for layer in gradients for g in layer))]:
        direction = random.normal(size=tensor.shape)
        original = tensor.copy()
        values = []
        for sign in (1, -1):
            tensor[...] = original + sign * step * direction
            values.append((function() * dy).sum())
        tensor[...] = original
        slope = (values[0] - values[1]) / (2 * step)
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post", "pre"])
def test_encoder_layers_are_the_published_ones(pb, tmp_path, pre_norm):
    s = encoder_layer(pb, 16, 2, 24, 2, pre_norm, layers=2)
    weights, (x, dy) = s.draw(), data(s, 2, 5, 16)

    def formula():
        y = x
        for w in weights:
            y = numpy_encoder(y, w, 2, gelu, pre_norm)
        return y

    y, dx, _, gradients = s.run(tmp_path, x, dy, batch=2, length=5)
    np.testing.assert_allclose(y, formula(), rtol=1e-6, atol=1e-6)  # the scale 1/sqrt(dim) is a float32
    check_slopes(formula, x, dy, dx, weights, gradients)


@pytest.mark.parametrize("qk_norm,weight_offset", [(False, 0), (True, 0), (False, 1)], ids=["llama", "qwen", "gemma"])
def test_decoder_layers_are_the_published_ones(pb, tmp_path, qk_norm, weight_offset):
    frequencies = [1.0, 0.1]
    s = llama_layer(pb, 16, 4, 2, 24, frequencies, qk_norm, weight_offset, layers=2)
    weights, (x, dy) = s.draw(), data(s, 2, 6, 16)

    def formula():
        y = x
        for w in weights:
            y = numpy_llama(y, w, 4, 2, frequencies, qk_norm, weight_offset)
        return y

    y, dx, _, gradients = s.run(tmp_path, x, dy, batch=2, length=6)
    np.testing.assert_allclose(y, formula(), rtol=1e-6, atol=1e-6)
    check_slopes(formula, x, dy, dx, weights, gradients)


def test_key_lengths_and_bits_hide_keys(pb, tmp_path):
    s = encoder_layer(pb, 16, 2, 24, 2, False)
    weights, (x, dy) = s.draw(), data(s, 2, 5, 16)
    mask = s.random.random((2, 1, 5, 5)) < 0.7
    mask[..., 0] = True
    bits = np.packbits(mask, axis=-1, bitorder="little").tobytes()
    y, *_ = s.run(tmp_path, x, dy, bits=bits, batch=2, length=5, bool_mask={"shape": [2, 1, 5, 5]},
                  lengths={"kv_len": [5, 3]})
    mask[1, :, :, 3:] = False
    np.testing.assert_allclose(y, numpy_encoder(x, weights[0], 2, gelu, False, mask), rtol=1e-6, atol=1e-6)


def test_rounding_is_to_the_element(pb, tmp_path):
    s = encoder_layer(pb, 16, 2, 24, 2, True)
    s.layout.element = 2
    s.draw()
    x, dy = [(np.float32(part).view(np.uint32) & 0xFFFF0000).view(np.float32) for part in data(s, 2, 5, 16)]
    exact, *_ = s.run(tmp_path, x, dy, batch=2, length=5)
    y, dx, *_ = s.run(tmp_path, x, dy, rounding="elements", batch=2, length=5)
    for part in (y, dx):
        assert not np.any(np.float32(part).view(np.uint32) & 0xFFFF)
    off = np.abs(y - exact).max() / np.abs(exact).max()
    assert 2.0**-12 < off < 2.0**-5


def test_bad_layouts_are_named(pb, tmp_path):
    s = encoder_layer(pb, 16, 2, 24, 2, True)
    s.draw()
    s.block.op[0].norm.weight = 77
    with pytest.raises(subprocess.CalledProcessError):
        s.run(tmp_path, *data(s, 2, 5, 16), batch=2, length=5)
    done = subprocess.run([REFERENCE, "run", str(tmp_path)], capture_output=True, text=True)
    assert "block[0].op[0].norm.weight: expected 0..11, got 77" in done.stderr


# ---- PyTorch.

@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torch_encoder_layer(pb, tmp_path, norm_first, activation):
    torch = pytest.importorskip("torch")
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, activation=activation, batch_first=True,
                                             norm_first=norm_first).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    a = layer.self_attn
    attention = [a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias]
    feed_forward = [layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias]
    norms = [[layer.norm1.weight, layer.norm1.bias], [layer.norm2.weight, layer.norm2.bias]]
    order = [norms[0], attention, norms[1], feed_forward] if norm_first else [attention, norms[0], feed_forward, norms[1]]
    tensors = [tensor for part in order for tensor in part]
    s = encoder_layer(pb, 16, 2, 24, {"relu": 1, "gelu": 2}[activation], norm_first)
    s.weights = [[tensor.detach().numpy() for tensor in tensors]]
    x, dy = data(s, 2, 5, 16)
    xt = torch.tensor(x, requires_grad=True)
    yt = layer(xt)
    yt.backward(torch.tensor(dy))
    y, dx, _, gradients = s.run(tmp_path, x, dy, batch=2, length=5)
    np.testing.assert_allclose(y, yt.detach().numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dx, xt.grad.numpy(), rtol=1e-6, atol=1e-6)
    for gradient, tensor in zip(gradients[0], tensors):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-5, atol=1e-5)


OPTIMIZERS = {
    "sgd": ("SGD", {}, {"sgd": {}}), "momentum": ("SGD", {"momentum": 0.9}, {"sgd": {"momentum": 0.9}}),
    "dampening": ("SGD", {"momentum": 0.9, "dampening": 0.5}, {"sgd": {"momentum": 0.9, "dampening": 0.5}}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}, {"sgd": {"momentum": 0.9, "nesterov": True}}),
    "adamw": ("AdamW", {}, {"adamw": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}}),
    "amsgrad": ("AdamW", {"amsgrad": True}, {"adamw": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "amsgrad": True}}),
    "adam": ("Adam", {}, {"adamw": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "coupled_decay": True}}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_over_1000_steps(pb, tmp_path, name):
    """Each of our steps stays within 2 units of torch's; here the curves of 1,000, whose differences may add."""
    torch = pytest.importorskip("torch")
    kind, options, layout = OPTIMIZERS[name]
    s = Stack(pb, 8)
    s.linear(0, 8, 8)
    weights = [np.float32(w) for w in s.draw()[0]]
    steps = np.float32(s.random.normal(size=(1000, 72)))
    write(tmp_path, "layout.pb", s.layout.SerializeToString())
    write(tmp_path, "optimizer.pb", pb.OptimizerLayout(group=[0, 1], **layout).SerializeToString())
    rates = [{"learning_rate": 1e-3, "weight_decay": 0.01}, {"learning_rate": 3e-3}]
    write(tmp_path, "rates.pb", pb.StepRequest(group=rates, multiplier=0.25, max_norm=1.0).SerializeToString())
    write(tmp_path, "weights", np.concatenate([w.ravel() for w in weights]).astype(np.float64).tobytes())
    write(tmp_path, "gradients", steps.astype(np.float64).tobytes())
    subprocess.run([REFERENCE, "step", str(tmp_path)], check=True)
    ours = np.fromfile(tmp_path / "weights_after").reshape(1000, 72)
    tensors = [torch.tensor(w, requires_grad=True) for w in weights]
    groups = [{"params": [tensors[0]], "lr": 1e-3, "weight_decay": 0.01},
              {"params": [tensors[1]], "lr": 3e-3, "weight_decay": 0.0}]
    optimizer = getattr(torch.optim, kind)(groups, **options)
    for step in range(1000):
        tensors[0].grad = torch.tensor(steps[step, :64].reshape(8, 8) * np.float32(0.25))
        tensors[1].grad = torch.tensor(steps[step, 64:] * np.float32(0.25))
        torch.nn.utils.clip_grad_norm_(tensors, 1.0)
        optimizer.step()
        theirs = np.concatenate([t.detach().numpy().ravel() for t in tensors])
        size = np.maximum(np.abs(theirs), 0.01)
        np.testing.assert_allclose(ours[step] / size, theirs / size, rtol=0, atol=2.0**-23 * 4 * (1 + step ** 0.5),
                                   err_msg=f"step {step}")
