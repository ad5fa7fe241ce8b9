"""Bool masks that are recognised as options: what is found describes the mask exactly, and results stay what they were."""
import os

import pytest

torch = pytest.importorskip("torch")

import attnd.torch as remote  # noqa: E402
from attnd.masks import recognise, tensors as read  # noqa: E402

DEVICE = os.environ.get("ATTND_TEST_DEVICE", "cpu")  # of tensors and masks: "cuda" where there is one
B, H, M, N = 3, 2, 7, 9
key, row = torch.arange(N), torch.arange(M)[:, None]
lengths = torch.tensor([9, 4, 6])[:, None, None]
pads = torch.tensor([0, 2, 4])[:, None, None]
holes = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 0, 1], [0, 1, 0, 0, 1, 1, 0, 1, 0], [1] * 9])[:, None].bool()
offsets = torch.tensor([2, 0, 1])[:, None, None]
SQUARE = torch.arange(M)
document = torch.tensor([0, 0, 0, 1, 1, 2, 2])

RECOGNISED = {  # mask, and which options say it
    "everything": (torch.ones(M, N), set()),
    "causal": (key <= row, {"causal"}),
    "bottom right": (key <= row + N - M, {"causal"}),
    "causal above the corner": (key <= row - 2, {"causal"}),
    "offsets": ((key <= row + offsets)[:, None], {"causal"}),
    "window": ((key <= row) & (key > row - 3), {"causal", "window"}),
    "two-sided window": ((key <= row + 2) & (key >= row - 1), {"causal", "window"}),
    "left bound": (key >= row - 2, {"window"}),
    "padding": ((key < lengths)[:, None], {"kv_lengths"}),
    "padding, one row": ((key < lengths)[:, None].expand(B, 1, M, N), {"kv_lengths"}),
    "padding, one length": ((key < 5)[None], {"kv_lengths"}),
    "causal, padding": (((key <= row + 2) & (key < lengths))[:, None], {"causal", "kv_lengths"}),
    "window, padding": (((key <= row + 2) & (key > row) & (key < lengths))[:, None], {"causal", "window", "kv_lengths"}),
    "nothing": (torch.zeros(M, N), {"kv_lengths"}),
    "left padding": (((key <= row + 2) & (key >= pads))[:, None], {"causal", "mask"}),
    "left padding to the last key": (((key <= row + 2) & (key >= pads * 2))[:, None], {"causal", "mask"}),
    "left padding, window": (((key <= row + 2) & (key > row - 2) & (key >= pads))[:, None], {"causal", "window", "mask"}),
    "left padding, every row": ((key >= pads).expand(B, M, N).contiguous()[:, None], {"mask"}),
    "padding on both sides": (((key <= row + 2) & (key >= pads) & (key < lengths))[:, None], {"causal", "mask"}),
    "padding with holes": (((key <= row + 2) & (holes | (key == 8)))[:, None], {"causal", "mask"}),
    "one entry sees nothing": ((key < torch.tensor([9, 0, 6])[:, None, None])[:, None], {"kv_lengths"}),
}
LEFT = {  # to be sent
    "one hole": (key <= row) & ~((key == 1) & (row == 4)),
    "one more": (key <= row) | ((key == 8) & (row == 3)),
    "heads differ": torch.stack([key <= row, key <= row + 1]),
    "random": torch.rand(B, H, M, N) < 0.5,
    "other width in each entry": ((key <= row) & (key > row - torch.tensor([1, 2, 3])[:, None, None]))[:, None],
    "prefix": (key <= row) | (key < 3),
    "one key for all": torch.ones(M, 1),
}


@pytest.fixture(autouse=True)
def sent(client, monkeypatch):
    """The names of the options of each call that reaches the client."""
    remote.connect(client)
    calls, forward = [], type(client).forward

    def noted(self, q, k, v, **options):
        options = {name: value for name, value in options.items() if value is not None}
        calls.append({name for name in ("mask", "causal", "window", "kv_lengths", "cu_seqlens_q") if name in options})
        if len(calls[-1]) > 1 and "mask" in options:  # of one row for all
            assert options["mask"].shape[1:3] == (1, 1)
        return forward(self, q, k, v, **options)

    monkeypatch.setattr(type(client), "forward", noted)
    return calls


def tensors(heads=H, m=M, n=N):
    torch.manual_seed(5)
    return [torch.randn(B, heads, length, 8).to(DEVICE).requires_grad_() for length in (m, n, n)]


def both(q, k, v, mask):
    """Output and gradients by ours and by PyTorch, for which a row without keys is one of zeros."""
    results, mask = [], mask if DEVICE == "cpu" else mask.to(DEVICE)
    whole = mask.expand(*q.shape[:3], k.shape[2]).contiguous()  # PyTorch's kernels for CUDA want it so
    for function, given in ((remote.scaled_dot_product_attention, mask),
                            (torch.nn.functional.scaled_dot_product_attention, whole)):
        out = function(q, k, v, attn_mask=given)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    return results


@pytest.mark.parametrize("name", RECOGNISED)
def test_option_takes_the_masks_place(sent, name):
    mask, options = RECOGNISED[name]
    for got, expected in zip(*both(*tensors(), mask.bool())):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert sent == [options]


@pytest.mark.parametrize("name", LEFT)
def test_mask_that_no_option_says_is_sent(sent, name):
    for got, expected in zip(*both(*tensors(), LEFT[name].bool())):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert sent == [{"mask"}]


def test_packed_sequences_of_a_batch_of_one(sent):
    q, k, v = [t[:1] for t in tensors(m=M, n=M)]
    mask = (document[:, None] == document) & (SQUARE[:, None] >= SQUARE)
    for got, expected in zip(*both(q, k, v, mask)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert sent == [{"causal", "cu_seqlens_q"}]
    mask[5, 0] = True
    for got, expected in zip(*both(q, k, v, mask)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert sent[1:] == [{"mask"}]


def shown_by(options):
    """The mask [B, M, N] that options say."""
    shown = torch.ones(B, M, N, dtype=torch.bool)
    if options.kv_lengths is not None:
        shown &= key < options.kv_lengths[:, None, None]
    if options.window is not None:
        (left, right), distance = options.window, key - row - options.offsets[:, None, None]
        shown &= (distance >= -left if left >= 0 else True) & (distance <= right if right >= 0 else True)
    return shown if options.keys is None else shown & options.keys[:, 0]


@pytest.mark.parametrize("where", ["host", "device"])
def test_every_change_of_one_element_is_seen(where, monkeypatch):
    if where == "device":  # as masks are compared there
        monkeypatch.setattr(read, "_rows", read.DeviceRows)
    for name, (mask, _) in RECOGNISED.items():
        mask = mask.bool()[(None,) * (4 - mask.dim())].expand(B, 1, M, N).clone()
        pattern = read.as_options(mask, (B, H, M, N))
        assert pattern is not None, name
        for at in torch.randperm(mask.numel())[:25].tolist():
            changed = mask.flatten().clone()
            changed[at] ^= True
            changed = changed.view(mask.shape)
            found = read.as_options(changed, (B, H, M, N))
            assert found is None or torch.equal(shown_by(found), changed[:, 0])


def test_mask_that_changes_under_the_same_tensor_is_looked_at_again(sent):
    import numpy as np
    memory = np.tril(np.ones((M, N), bool))
    mask = torch.from_numpy(memory)
    for change in (lambda: None, lambda: memory.__setitem__((2, 7), True), lambda: memory.__setitem__((2, 7), False)):
        change()  # behind torch's back
        for got, expected in zip(*both(*tensors(), mask)):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert sent[:2] == [{"causal"}, {"mask"}]


def test_one_mask_is_read_once_for_all_layers(monkeypatch):
    reads, original = [], recognise.options_of
    monkeypatch.setattr(recognise, "options_of", lambda *a: (reads.append(1), original(*a))[1])
    mask = (key <= row)[None, None].expand(B, 1, M, N).to(DEVICE)
    for _ in range(5):
        remote.scaled_dot_product_attention(*tensors(), attn_mask=mask)
    assert reads == [1]


def test_what_a_mask_was_known_as_goes_with_it():
    import gc
    import weakref
    mask = torch.ones(M, N, dtype=torch.bool)
    pattern = read.as_options(mask, (B, H, M, N))
    kept = weakref.ref(next(iter(read._known[mask].values())).described)
    assert pattern is not None and kept() is not None
    del mask
    gc.collect()
    assert kept() is None


def test_dropout_drops_the_same_whether_the_mask_is_recognised_or_not(monkeypatch):
    given = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(remote, "as_options", lambda *a: None)
        torch.manual_seed(3)
        given.append(remote.scaled_dot_product_attention(*tensors(), attn_mask=(key <= row).to(DEVICE), dropout_p=0.5))
    torch.testing.assert_close(*given, rtol=1e-5, atol=1e-6)
