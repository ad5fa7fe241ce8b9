"""attnd.torch.flex_attention and attnd.masks.from_mask_mod against PyTorch's flex_attention, forward and backward, and
against each mask_mod score by score."""
import numpy as np
import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
import attnd  # noqa: E402
import attnd.masks as m  # noqa: E402
import attnd.torch as remote  # noqa: E402
from attnd.masks.nodes import Blocks, walk  # noqa: E402

B, H, N, D = 2, 4, 150, 16
DOCUMENT = torch.tensor([0] * 20 + [1] * 61 + [2] * 40 + [3] * 29)
TWO = torch.stack([DOCUMENT, torch.arange(N) // 50])
LENGTHS = torch.tensor([30, 75])
PADDING = torch.rand(N, generator=torch.Generator().manual_seed(1)) < 0.8
HEADS = torch.tensor([4, 16, 40, 150])
PARENT = torch.tensor([max(0, (n - 1) // 2) for n in range(N)])


def causal(b, h, q, k):
    return q >= k


def natten(b, h, q, k):
    return ((q % 15 - k % 15).abs() <= 2) & ((q // 15 - k // 15).abs() <= 2)


FLEX = {  # (mask_mod, batch, heads): those of PyTorch's attention-gym and of published models
    "causal": (causal, 1, 1),
    "sliding window": (lambda b, h, q, k: (q >= k) & (q - k <= 24), 1, 1),
    "prefix": (lambda b, h, q, k: (k < LENGTHS[b]) | (q >= k), B, 1),
    "documents": (flex.and_masks(causal, lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k]), 1, 1),
    "documents of each entry": (lambda b, h, q, k: (TWO[b, q] == TWO[b, k]) & (q >= k), B, 1),
    "padding": (lambda b, h, q, k: PADDING[k] & (q >= k), 1, 1),
    "dilated window": (lambda b, h, q, k: ((q - k) % 4 == 0) & ((q - k).abs() <= 40), 1, 1),
    "strided": (lambda b, h, q, k: (q >= k) & ((q - k < 8) | (k % 8 == 7)), 1, 1),
    "chunks": (lambda b, h, q, k: (q // 32 == k // 32) & (q >= k), 1, 1),
    "global tokens": (lambda b, h, q, k: (q < 4) | (k < 4) | (torch.abs(q - k) <= 8), 1, 1),
    "width of each head": (lambda b, h, q, k: (q >= k) & (q - k < HEADS[h]), 1, H),
    "neighbourhood": (natten, 1, 1),
}
LISTS = {"neighbourhood"}  # that no kind says
ODD = {  # besides
    "above the diagonal": (lambda b, h, q, k: q < k, True),
    "far": (lambda b, h, q, k: ~(q - k < 10), True),
    "one diagonal": (lambda b, h, q, k: q == k + 3, True),
    "all but it": (lambda b, h, q, k: q != k, True),
    "same residue": (lambda b, h, q, k: q % 7 == k % 7, True),
    "shifted columns": (lambda b, h, q, k: (k + 5) % 7 <= 3, True),
    "blocks before": (lambda b, h, q, k: (q + 5) // 32 > (k + 5) // 32, True),
    "near blocks": (lambda b, h, q, k: abs(q // 32 - k // 32) <= 1, True),
    "one block of rows": (lambda b, h, q, k: torch.logical_and(q // 32 == 2, torch.tensor(5) <= k), True),
    "rows of an array": (lambda b, h, q, k: torch.logical_or(PADDING[q], DOCUMENT[k] >= 2), True),
    "ids that come again": (lambda b, h, q, k: PADDING.long()[q] == PADDING.long()[k], True),
    "a branch": (lambda b, h, q, k: torch.where(q > 10, k > 5, k < 5), False),
    "either or": (lambda b, h, q, k: (q >= k) ^ (k < 10), False),
    "a tree": (lambda b, h, q, k: (q == k) | (PARENT[q] == k) | (PARENT[PARENT[q]] == k), False),
    "order of an array": (lambda b, h, q, k: DOCUMENT[q] >= DOCUMENT[k], False),
    "a product": (lambda b, h, q, k: (q * k) % 5 == 1, False),
}


def scores(mask_mod, batch, heads, rows=N, keys=N):
    b, h, q, k = torch.meshgrid(*map(torch.arange, (batch, heads, rows, keys)), indexing="ij")
    return mask_mod(b, h, q, k).numpy()


def is_closed(mask):
    return not any(isinstance(part, Blocks) for part in walk(mask))


@pytest.fixture(autouse=True)
def connected(client):
    remote.connect(client)


def tensors(kv_heads=H):
    torch.manual_seed(3)
    return [torch.randn(B, heads, N, D).requires_grad_() for heads in (H, kv_heads, kv_heads)]


@pytest.mark.parametrize("name", FLEX)
def test_attention_and_gradients_are_those_of_flex_attention(name, monkeypatch):
    mask_mod, batch, heads = FLEX[name]
    block_mask = flex.create_block_mask(mask_mod, batch if batch > 1 else None, heads if heads > 1 else None, N, N, "cpu",
                                        BLOCK_SIZE=32)
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # PyTorch has no backward on CPUs but this one
    q, k, v = tensors()
    expected = flex.flex_attention(q, k, v, block_mask=block_mask)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    described = m.from_mask_mod(mask_mod, N, N, batch=batch, heads=heads)
    assert is_closed(described) == (name not in LISTS)
    for mask in (block_mask, described):
        out = remote.flex_attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        for got, wanted in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), gradients):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ODD)
def test_what_a_mask_mod_shows_is_what_its_mask_shows(name):
    mask_mod, closed = ODD[name]
    mask = m.from_mask_mod(mask_mod, N, N - 13)
    assert is_closed(mask) == closed, mask
    np.testing.assert_array_equal(mask.to_dense(1, 1, N, N - 13, align=0), scores(mask_mod, 1, 1, N, N - 13))


def test_a_mask_mod_that_lies_to_symbols_is_evaluated():
    """Which it can tell from tensors."""
    def mask_mod(b, h, q, k):
        return q >= k if not isinstance(q, torch.Tensor) else q >= k + 1
    mask = m.from_mask_mod(mask_mod, N, N)
    assert not is_closed(mask)
    np.testing.assert_array_equal(mask.to_dense(1, 1, N, N)[0, 0], np.tri(N, k=-1, dtype=bool))


@pytest.mark.parametrize("size", [32, (64, 16), 128])
@pytest.mark.parametrize("name", ["documents of each entry", "width of each head", "neighbourhood"])
def test_block_masks_show_what_their_functions_do(name, size):
    mask_mod, batch, heads = FLEX[name]
    block_mask = flex.create_block_mask(mask_mod, batch, heads, N, N, "cpu", BLOCK_SIZE=size)
    mask = m.from_block_mask(block_mask)
    np.testing.assert_array_equal(mask.to_dense(batch, heads, N, N), scores(mask_mod, batch, heads))


def test_block_masks_made_of_lists():
    """Full blocks ask no mask_mod; entries of the lists beyond their counts are anything."""
    counts, indices = torch.tensor([[[1, 0, 2]]]), torch.tensor([[[[1, 7, 7], [7, 7, 7], [0, 2, 7]]]])
    full_counts, full = torch.tensor([[[1, 1, 0]]]), torch.tensor([[[[0, 7, 7], [2, 7, 7], [7, 7, 7]]]])
    block_mask = flex.BlockMask.from_kv_blocks(counts.int(), indices.int().clamp(max=2), full_counts.int(),
                                               full.int().clamp(max=2), BLOCK_SIZE=16, mask_mod=causal)
    dense = np.zeros((48, 48), bool)
    dense[:16, :16] = dense[16:32, 32:] = True
    partial = np.tri(48, dtype=bool)
    for r, c in ((0, 1), (2, 0), (2, 2)):
        at = slice(16 * r, 16 * r + 16), slice(16 * c, 16 * c + 16)
        dense[at] = partial[at]
    np.testing.assert_array_equal(m.from_block_mask(block_mask).to_dense(1, 1, 48, 48)[0, 0], dense)


def test_a_block_mask_is_described_once(monkeypatch):
    from attnd.masks import block_masks
    made, convert = [], block_masks.from_block_mask
    monkeypatch.setattr(block_masks, "from_block_mask", lambda *a: (made.append(1), convert(*a))[1])
    block_mask = flex.create_block_mask(natten, None, None, N, N, "cpu", BLOCK_SIZE=32)
    q, k, v = tensors(kv_heads=2)
    outputs = [remote.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_lse=True) for _ in range(3)]
    assert made == [1]
    dense = torch.from_numpy(scores(natten, 1, 1))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    for out, lse in outputs:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert lse.shape == (B, H, N) and not lse.isinf().any()


def test_a_large_mask_mod_takes_no_array_of_all_scores():
    """8192 tokens: 64 MiB of bools; its blocks are about 7 % of that."""
    import tracemalloc
    n = 8192
    document = torch.arange(n) // 1000
    tracemalloc.start()
    try:
        closed = m.from_mask_mod(lambda b, h, q, k: (document[q] == document[k]) & (q >= k), n, n)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert is_closed(closed) and m.count(closed, n) == 8 * 1000 * 1001 // 2 + 192 * 193 // 2


def test_what_is_refused():
    q, k, v = tensors()
    block_mask = flex.create_block_mask(causal, None, None, N, N, "cpu", BLOCK_SIZE=32)
    with pytest.raises(attnd.Unimplemented, match="score_mod: expected None"):
        remote.flex_attention(q, k, v, score_mod=lambda s, *i: s)
    with pytest.raises(attnd.InvalidArgument, match="block_mask: expected one of 140 rows and 150 keys, got 150 and 150"):
        remote.flex_attention(q[:, :, :140], k, v, block_mask=block_mask)
    with pytest.raises(attnd.InvalidType, match="block_mask: expected None, a BlockMask, or a Mask .*, got function"):
        remote.flex_attention(q, k, v, block_mask=causal)
    with pytest.raises(attnd.InvalidArgument, match="key: expected 4 heads, as query has, or enable_gqa=True, got 2"):
        remote.flex_attention(q, *tensors(kv_heads=2)[1:])
    entries = flex.create_block_mask(lambda b, h, q, k: k < b + q, 3, None, N, N, "cpu", BLOCK_SIZE=32)
    with pytest.raises(attnd.InvalidArgument, match="block_mask: expected B = 1 or 2, got 3"):
        remote.flex_attention(q, k, v, block_mask=entries)
    one = flex.create_block_mask(FLEX["width of each head"][0], None, None, N, N, "cpu", BLOCK_SIZE=32)
    with pytest.raises(attnd.InvalidArgument, match="block_mask: expected one made with B=2, H=4, since its mask_mod"):
        remote.flex_attention(q, k, v, block_mask=one)
    for name, mask_mod in {"batch": lambda b, h, q, k: (q >= k) & (b == 1),
                           "heads": lambda b, h, q, k: q - k < HEADS[h]}.items():
        with pytest.raises(attnd.InvalidArgument, match=f"{name}: expected how many there are, since mask_mod depends"):
            m.from_mask_mod(mask_mod, N, N)
        assert m.from_mask_mod(mask_mod, N, N, batch=1, heads=1) != m.from_mask_mod(mask_mod, N, N, batch=2, heads=2)
    with pytest.raises(attnd.InvalidType, match="mask_mod: expected a function of batch, head, query and key, got Tensor"):
        m.from_mask_mod(torch.ones(3), N, N)
    with pytest.raises(attnd.InvalidType, match="mask_mod: expected a function whose result is one bool tensor"):
        m.from_mask_mod(lambda b, h, q, k: q - k, N, N)
    with pytest.raises(attnd.InvalidArgument, match=r"rows: expected 1\.\.1048576, got 0"):
        m.from_mask_mod(causal, 0, N)
    with pytest.raises(attnd.InvalidType, match="block_mask: expected a torch.nn.attention.*, got function"):
        m.from_block_mask(causal)
