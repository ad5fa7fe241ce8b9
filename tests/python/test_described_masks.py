"""attnd.masks: what each mask shows, its message, its arguments, and the masks of other libraries. NumPy alone; what the
daemon computes with them is test_mask_calls.py's."""
import math
import pickle
import re

import numpy as np
import pytest
from mask_message import Oracle, generated, philox

import attnd
import attnd.masks as m
from attnd.masks.sizes import Sizes
from attnd.masks.wire import serialize


@pytest.fixture(scope="session")
def message(tmp_path_factory):
    pytest.importorskip("google.protobuf")
    return generated(str(tmp_path_factory.mktemp("mask")))


def parse(message, mask, sizes):
    """The MaskSpec; protobuf's own bytes for it are the package's."""
    data = serialize(mask, Sizes(*sizes))
    spec = message.MaskSpec.FromString(data)
    assert spec.SerializeToString(deterministic=True) == data
    assert len(spec.pattern) >= 1 and spec.version == 1
    return spec


def compare(message, mask, sizes, align=0):
    """Each score of to_dense against the message's own definition."""
    batch, heads, rows, keys = sizes
    dense = mask.to_dense(*sizes, align=align)
    offsets = list(np.broadcast_to(np.asarray(align), (batch,)))
    oracle = Oracle(parse(message, mask, sizes), batch, heads, [int(offset) for offset in offsets])
    expected = np.array([[[[oracle.sees(b, h, i, j) for j in range(keys)] for i in range(rows)] for h in range(heads)]
                         for b in range(batch)])
    np.testing.assert_array_equal(dense, expected)
    assert m.count(mask, rows, keys, batch=batch, heads=heads, align=align) == expected.sum()
    return dense


# ---- Random masks.

def number(rng, low, high):
    return int(rng.integers(low, high + 1))


def random_list(rng, sizes):
    batch, _, rows, keys = sizes
    kind = number(rng, 0, 7)
    if kind == 0:
        bq, bk = number(rng, 1, 9), number(rng, 1, 9)
        return m.blocks(rng.random((-(-rows // bq), -(-keys // bk))) < 0.4, (bq, bk))
    if kind == 1:
        ends = np.sort(rng.integers(0, keys + 1, (1, 5, rows)), axis=1)
        return m.from_endpoints(ends)
    if kind == 2:
        first, stride = rng.integers(0, keys, rows), rng.integers(1, 5, rows)
        return m.runs(first, stride, rng.integers(0, (keys - 1 - first) // stride + 2), keys)
    if kind == 3:
        edges = np.sort(rng.integers(0, rows + 1, (keys, 2, 2)), axis=2).reshape(keys, 4)
        return m.from_flashmask(edges, causal=False)
    if kind == 4:
        spans = [(*np.sort(rng.integers(0, rows + 1, 2)), *np.sort(rng.integers(0, keys + 1, 2)),
                  ("full", "causal", "inverse_causal", "band")[number(rng, 0, 3)]) for _ in range(number(rng, 0, 4))]
        return m.rectangles(spans)
    if kind == 5:
        return m.bits(rng.random((rows, keys)) < 0.5)
    if kind == 6:
        shape = [(rows,), (keys,)] if number(rng, 0, 1) else [(batch, rows), (batch, keys)]
        return m.groups(rng.integers(0, 3, shape[0]), rng.integers(0, 3, shape[1]))
    bq, bk = number(rng, 1, 9), number(rng, 1, 9)
    layout = rng.random((-(-rows // bq), -(-keys // bk))) < 0.4
    indptr = np.concatenate([[0], np.cumsum(layout.sum(1))])
    return m.from_bsr(indptr, np.nonzero(layout)[1].astype(int), bq, bk, keys, rng.random((layout.sum(), bq, bk)) < 0.5)


def random_leaf(rng, sizes):
    batch, _, rows, keys = sizes
    if rng.random() < 0.4:
        return random_list(rng, sizes)
    kind, p = number(rng, 0, 8), number(rng, 1, 7)
    if kind == 0:
        return m.window(number(rng, -1, 20), number(rng, -1, 20))
    if kind == 1:
        return m.dilated(p, number(rng, -1, 5), number(rng, -1, 5))
    if kind == 2:
        return m.stride(p, number(rng, 0, p - 1))
    if kind == 3:
        return m.stride_columns(p, *sorted([number(rng, 0, p), number(rng, 0, p)]))
    if kind == 4:
        shift = rng.integers(-9, 9, (1, batch)[number(rng, 0, 1)]) if rng.random() < 0.7 else None
        return m.block_window(p, *sorted([number(rng, -3, 3), number(rng, -3, 3)]), shift=shift)
    if kind == 5:
        edges = np.sort(rng.integers(0, max(rows, keys) + 5, 4))
        spans = [(edges[0], edges[1]), (edges[2], edges[3])]
        return (m.global_(rows=spans), m.global_(cols=spans), m.global_(rows=spans, cols=spans),
                m.global_(rows=spans, cols=[3]))[number(rng, 0, 3)]
    if kind == 6:
        return m.prefix(rng.integers(0, keys + 3, (1, batch)[number(rng, 0, 1)]))
    if kind == 7:
        return m.documents(np.concatenate([[0], np.sort(rng.integers(0, keys + 3, number(rng, 0, 4)))]))
    exclude = m.window(number(rng, 0, 20), number(rng, 0, 20)) if rng.random() < 0.5 else None
    return m.random_blocks(number(rng, 1, 8), number(rng, 0, 6), seed=number(rng, 0, 2**63 - 1),
                           per_head=bool(number(rng, 0, 1)), exclude=exclude)


def random_mask(rng, sizes, depth=3):
    kind = number(rng, 0, 4) if depth else 0
    if kind < 2:
        return random_leaf(rng, sizes)
    one = random_mask(rng, sizes, depth - 1)
    if kind == 2:
        return ~one
    other = random_mask(rng, sizes, depth - 1)
    return one & other if kind == 3 else one | other


def test_masks_show_what_their_messages_say(message, rng):
    for _ in range(60):
        sizes = number(rng, 1, 3), number(rng, 1, 3), number(rng, 1, 25), number(rng, 1, 25)
        align = rng.integers(-9, 9, sizes[0])
        compare(message, random_mask(rng, sizes), sizes, align)


def test_masks_of_heads_and_batch_entries(message, rng):
    for _ in range(12):
        sizes = number(rng, 2, 3), number(rng, 2, 3), number(rng, 1, 17), number(rng, 1, 17)
        heads = [m.per_head([random_mask(rng, sizes, 1) for _ in range(sizes[1])]) for _ in range(sizes[0])]
        both, one = m.per_batch(heads), random_mask(rng, sizes, 1)
        dense = compare(message, both, sizes)
        for b in range(sizes[0]):
            np.testing.assert_array_equal(dense[b], heads[b].to_dense(*sizes, align=0)[b])
        np.testing.assert_array_equal(compare(message, both & one, sizes), dense & one.to_dense(*sizes, align=0))
        np.testing.assert_array_equal(compare(message, one | ~heads[0], sizes),
                                      one.to_dense(*sizes, align=0) | ~heads[0].to_dense(*sizes, align=0))
        compare(message, m.per_batch([random_leaf(rng, sizes) for _ in range(sizes[0])]), sizes)


def test_a_problem_is_a_part_of_its_mask(message, rng):
    for _ in range(25):
        whole = 2, 2, number(rng, 5, 20), number(rng, 5, 20)
        row, key = number(rng, 0, whole[2] - 1), number(rng, 0, whole[3] - 1)
        part = 2, 2, number(rng, 1, whole[2] - row), number(rng, 1, whole[3] - key)
        mask, offset = random_mask(rng, whole, 2), number(rng, -5, 5)
        dense = mask.to_dense(*whole, align=offset)
        found = compare(message, mask.at(row, key, whole[2], whole[3]), part, offset + row - key)
        np.testing.assert_array_equal(found, dense[:, :, row:row + part[2], key:key + part[3]])


@pytest.mark.parametrize("name, mask, rows, keys, align, expected", [
    ("causal", m.causal(), 100, 100, None, 100 * 101 // 2),
    ("window", m.window(7, 7), 100, 100, None, 100 * 15 - 7 * 8),
    ("causal window", m.window(7, 0), 100, 100, None, 100 * 8 - 7 * 8 // 2),
    ("global", m.global_(rows=[(0, 6)], cols=[(0, 6)]), 100, 100, None, 100**2 - 94**2),
    ("stride", m.stride(4), 100, 100, None, 100**2 // 4),
    ("own and the block before", m.block_window(10, -1, 0), 100, 100, None, 100 + 2 * 100 * 9),
    ("documents", m.documents([0, 20, 50, 100]), 100, 100, None, 20**2 + 30**2 + 50**2),
    ("causal documents", m.documents([0, 20, 50, 100]) & m.causal(), 100, 100, None, 210 + 465 + 1275),
    ("bottom right", m.causal(), 30, 100, "bottom_right", 30 * 70 + 30 * 31 // 2),
    ("top left", m.causal(), 30, 100, "top_left", 30 * 31 // 2),
    ("bottom right of more rows", m.causal(), 100, 30, "bottom_right", 30 * 31 // 2),
    ("everything", m.all_(), 30, 20, None, 600),
    ("nothing", ~m.all_(), 30, 20, None, 0),
    ("prefix", m.causal() | m.prefix(25), 100, 100, None, 5050 + 25 * 24 // 2),
    ("random blocks", m.random_blocks(10, 3, seed=5), 100, 100, None, 10 * 3 * 100),
    ("random blocks beside a window", m.random_blocks(10, 3, seed=5, exclude=m.block_window(10))
     | m.block_window(10), 100, 100, None, 10 * 4 * 100),
], ids=lambda value: value if isinstance(value, str) else "")
def test_count(name, mask, rows, keys, align, expected):
    assert m.count(mask, rows, keys, align=align) == expected
    assert m.count(mask, rows, keys, align=align, batch=2, heads=3) == 6 * expected
    assert mask.to_dense(1, 1, rows, keys, align).sum() == expected


def test_random_blocks_are_those_of_the_published_generator(message):
    assert philox((0, 0, 0, 0), 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's known answers
    assert philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    dense = m.random_blocks(4, 5, seed=2**40 + 3, per_head=True).to_dense(1, 2, 24, 64, 0)[0]
    assert (dense.sum(-1) == 5 * 4).all() and (dense[0] != dense[1]).any()
    np.testing.assert_array_equal(np.repeat(dense[:, ::4, ::4], 4, 1).repeat(4, 2), dense)
    again = m.random_blocks(4, 5, seed=2**40 + 3, per_head=True).to_dense(1, 2, 24, 64, 0)[0]
    np.testing.assert_array_equal(dense, again)
    assert (m.random_blocks(4, 5, seed=2**40 + 4).to_dense(1, 1, 24, 64, 0)[0, 0] != dense[0]).any()


# ---- Values.

def test_masks_are_values(rng):
    with pytest.raises(TypeError, match="& for and"):  # and not, and or
        m.causal() and m.window(3, 3)
    sizes = 2, 2, 12, 12
    for _ in range(60):
        seed = number(rng, 0, 1 << 30)
        one, same = [random_mask(np.random.default_rng(seed), sizes) for _ in range(2)]
        assert one == same and hash(one) == hash(same) and one is not same and one.token != same.token
        copy = pickle.loads(pickle.dumps(one))
        assert copy == one and serialize(copy, Sizes(*sizes)) == serialize(one, Sizes(*sizes))
    layout = np.ones((2, 2), bool)
    mask = m.blocks(layout, 8)
    layout[:] = False
    assert m.count(mask, 16) == 256
    for change in (lambda: setattr(mask, "bq", 4), lambda: mask.indices.array.__setitem__(0, 1)):
        with pytest.raises((AttributeError, ValueError)):
            change()
    assert m.window(3, 0) != m.window(0, 3) and m.per_head([m.all_(), m.causal()]) != m.causal()


def test_equal_heads_are_one_pattern(message):
    layout = np.random.default_rng(1).random((4, 3, 3)) < 0.5
    layout[2] = layout[0]
    spec = parse(message, m.blocks(layout, 5), (2, 4, 15, 15))
    assert len(spec.pattern) == 3 and list(spec.pattern_of) == [0, 1, 0, 2]
    spec = parse(message, m.blocks(np.stack([layout[0]] * 4), 5), (2, 4, 15, 15))
    assert len(spec.pattern) == 1 and list(spec.pattern_of) == [0]
    mask = m.per_batch([m.causal(), m.all_()])
    assert list(parse(message, mask, (2, 3, 4, 4)).pattern_of) == [0, 0, 0, 1, 1, 1]


def test_lists_beside_expressions_are_patterns_of_their_own(message):
    blocks, other = m.blocks(np.eye(3, dtype=bool), 4), m.bits(np.eye(12, dtype=bool))
    mask = m.per_head([(blocks | m.causal()) & ~other, blocks & m.window(3, 3), blocks])
    spec = parse(message, mask, (1, 3, 12, 12))
    assert [pattern.WhichOneof("kind") for pattern in spec.pattern] == ["blocks", "bits", "expr", "expr"]
    assert list(spec.pattern_of) == [2, 3, 0]


def test_numbers_travel_as_narrow_as_they_are(message):
    for most, width in ((255, 1), (256, 2), (65535, 2), (65536, 4)):
        spec = parse(message, m.intervals([0, 0], [3, most], most), (1, 1, 2, most))
        assert spec.pattern[0].row_intervals.end.entry_bytes == width
    assert len(serialize(m.causal() & m.window(255, -1), Sizes(1, 16, 1 << 20, 1 << 20))) < 50


def test_a_list_may_be_longer_than_the_problem(message):
    lists = {"groups": m.groups(np.arange(20) // 7 + 1), "bits": m.bits(np.tri(20, dtype=bool)),
             "intervals": m.intervals(np.zeros(20, int), np.arange(20) + 1, 20),
             "blocks": m.blocks(np.tri(5, dtype=bool), 4)}
    for name, mask in lists.items():
        dense = mask.to_dense(1, 1, 20, 20)
        np.testing.assert_array_equal(compare(message, mask, (1, 1, 7, 9)), dense[:, :, :7, :9]), name
        spec = parse(message, mask, (1, 1, 7, 9))
        assert (spec.extents.rows, spec.extents.keys) == (20, 20) or name == "blocks"
    spec = parse(message, m.blocks(np.tri(5, dtype=bool), 4), (1, 1, 18, 19))
    assert (spec.extents.rows, spec.extents.keys) == (18, 19)
    assert parse(message, m.causal().require_keys(), (1, 1, 7, 9)).empty_row == 1


# ---- What is refused.

def deep(levels):
    mask = m.causal()
    for n in range(levels):
        mask = ~(mask | m.prefix(n))
    return mask


def fits(mask, *sizes):
    return lambda: serialize(mask, Sizes(*(sizes or (2, 3, 10, 12))))


@pytest.mark.parametrize("make, said", [
    (lambda: m.window(-2, 0), r"window left: expected -1\.\.2147483647, got -2"),
    (lambda: m.window(0, 1.5), "window right: expected an int of .*, got float"),
    (lambda: m.dilated(0, 1, 1), r"dilated step: expected 1\.\..*, got 0"),
    (lambda: m.stride(0), "stride p: expected 1.*, got 0"),
    (lambda: m.stride(4, 4), r"stride phase: expected 0\.\.3, got 4"),
    (lambda: m.stride_columns(4, 3, 2), r"stride_columns lo: expected 0\.\.2, got 3"),
    (lambda: m.stride_columns(4, 0, 5), r"stride_columns hi: expected 0\.\.4, got 5"),
    (lambda: m.block_window(0), "block_window p: expected 1.*, got 0"),
    (lambda: m.block_window(4, 1, 0), "block_window lo: expected .*, got 1"),
    (lambda: m.global_(rows=[(5, 3)]), "global_ rows: expected start at most end 3, got 5"),
    (lambda: m.global_(cols=[(1, 2, 3)]), "global_ cols: expected positions, or intervals"),
    (lambda: m.global_(cols=7), "global_ cols: expected positions, .*, got int"),
    (lambda: m.prefix([]), "prefix lengths: expected"),
    (lambda: m.documents([1, 4]), "documents cu_seqlens: expected 0 at its beginning, got 1"),
    (lambda: m.documents([0, 4, 3]), "documents cu_seqlens: expected never falling: at least 4, got 3"),
    (lambda: m.groups([-1, 2]), "groups row_ids: expected 0.*, got -1"),
    (lambda: m.groups([[1, 2]], [1, 2]), "groups key_ids: expected shape .*, as row_ids has"),
    (lambda: m.random_blocks(0, 1, seed=1), "random_blocks block: expected 1"),
    (lambda: m.random_blocks(4, 1, seed=-1), "random_blocks seed: expected 0"),
    (lambda: m.random_blocks(4, 1, seed=1, exclude=m.causal().at(1)), "random_blocks exclude: expected one mask"),
    (lambda: m.blocks(np.ones((2, 2), bool), 0), "blocks size: expected 1.*, got 0"),
    (lambda: m.blocks(np.ones((2, 2)), 4), "blocks layout: expected a bool array .*, got an array of float64"),
    (lambda: m.blocks(np.ones(2, bool), 4), "blocks layout: expected 2 to 4 dimensions"),
    (lambda: m.blocks(np.full((2, 2), 3), 4), r"blocks layout: expected 0\.\.1, got 3"),
    (lambda: m.intervals([5], [3]), "intervals begin: expected at most its end 3, got 5"),
    (lambda: m.intervals([[0, 2]], [[3, 5]]), "intervals begin: expected at least the end before it, 3, got 2"),
    (lambda: m.intervals([[0, 9, 2]], [[3, 9, 5]]), "intervals begin: expected at least the end before it, 3, got 2"),
    (lambda: m.intervals([0, 1], [3]), r"intervals end: expected shape \(2, 1\)"),
    (lambda: m.intervals([0], [13], 12), "intervals end: expected keys below 12, got 12"),
    (lambda: m.runs([0], [0], [2]), "runs stride: expected 1 or above where count is above 1, got 0"),
    (lambda: m.runs([3], [4], [3], 11), "runs count: expected keys below 11, got 11"),
    (lambda: m.rectangles([(0, 1, 5, 3)]), "rectangles key_begin: expected at most key_end 3, got 5"),
    (lambda: m.rectangles([(0, 1, 2)]), r"rectangles\[0\]: expected \(row_begin"),
    (lambda: m.rectangles([(0, 1, 2, 3, "round")]), r"rectangles\[0\] shape: expected full or causal.*, got 'round'"),
    (lambda: m.bits(np.ones((2, 2, 2, 2, 2), bool)), "bits: expected 2 to 4 dimensions"),
    (lambda: m.per_head([]), "per_head: expected at least one mask, got none"),
    (lambda: m.per_head([m.causal(), True]), r"per_head\[1\]: expected a Mask, .*, got bool"),
    (lambda: m.per_head([m.per_head([m.all_()])]), "mask: expected masks of single heads"),
    (lambda: m.causal() & np.ones((3, 3), bool), "mask: expected a Mask, made by attnd.masks, got ndarray"),
    (lambda: np.ones((3, 3), bool) & m.causal(), "mask: expected a Mask, made by attnd.masks, got ndarray"),
    (lambda: m.causal().at(1) & m.all_(), r"mask: expected masks combined first"),
    (lambda: m.per_head([m.all_()] * 2) & m.per_head([m.all_()] * 3), "mask: expected .* number of heads, got 2 and 3"),
    (lambda: m.causal().to_dense(1, 1, 3, 4), 'align: expected "top_left".* rows and keys differ, got None'),
    (lambda: m.causal().to_dense(2, 1, 3, 3, align=[0, 1, 2]), "align: expected 1 or 2 entries, got 3"),
    (fits(m.per_head([m.all_(), m.causal()])), "mask per_head: expected 1 or 3, the problem's query heads, got 2"),
    (fits(m.per_batch([m.all_(), m.causal(), m.all_()])), "mask per_batch: expected 1 or 2, .* batch entries, got 3"),
    (fits(m.prefix([1, 2, 3])), "mask prefix lengths: expected 1 or 2, the problem's batch entries, got 3"),
    (fits(m.block_window(4, shift=[1, 2, 3])), "mask block_window shift: expected 1 or 2"),
    (fits(m.groups(np.ones((3, 12), int))), "mask groups row_ids: expected 1 or 2"),
    (fits(m.groups(np.ones(9, int), np.ones(12, int))), "groups row_ids: expected at least 10 rows, .*, got 9"),
    (fits(m.bits(np.ones((10, 11), bool))), "mask bits: expected at least 12 keys, for the problem's 12, got 11"),
    (fits(m.blocks(np.ones((2, 3), bool), 4)), "mask blocks: expected at least 10 rows, for the problem's 10, got 8"),
    (fits(m.intervals([0] * 9, [1] * 9)), "mask intervals: expected at least 10 rows"),
    (fits(m.causal().at(rows=9)), "mask at rows: expected at least 10 rows"),
    (fits(m.bits(np.ones((10, 12), bool)).at(row=1)), "mask bits: expected at least 11 rows, .* 10 from 1, got 10"),
    (fits(m.bits(np.ones((10, 12), bool)) & m.bits(np.ones((11, 12), bool))),
     "expected at least 11 rows.*another list.*, got 10"),
    (fits(deep(16)), "mask: expected a depth of at most 16, got 17"),
    (fits(m.all_().at(row=1 << 20)), r"mask rows: expected 1\.\.1048576"),
], ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_what_is_wrong_is_said(make, said):
    with pytest.raises(attnd.InvalidArgument) as error:
        make()
    assert re.search(said, str(error.value)), str(error.value)
    assert error.value.field and error.value.metadata["expected"]


def test_masks_have_limits():
    many = m.prefix(0)
    for n in range(1, 4097):
        many = many | m.prefix(n)
    with pytest.raises(attnd.InvalidArgument, match="mask: expected at most 4096 parts"):
        serialize(many, Sizes(1, 1, 8, 8))
    with pytest.raises(attnd.InvalidArgument, match="rectangles: expected at most 65536, got 65537"):
        m.rectangles(np.zeros((65537, 4), int))
    heads = m.per_head([m.bits(np.eye(14, dtype=bool)[[n >> k & 1 for k in range(14)]]) for n in range(4097)])
    with pytest.raises(attnd.InvalidArgument, match="mask: expected at most 4096 distinct patterns"):
        serialize(heads, Sizes(1, 4097, 14, 14))


def test_show_without_matplotlib(monkeypatch):
    import builtins
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(attnd.Unimplemented, match="show: expected matplotlib to be installed"):
        m.causal().show(8)


def test_show(monkeypatch):
    """Checks what is drawn, on axes of our own."""
    import sys
    import types
    drawn = {}
    axes = types.SimpleNamespace(imshow=lambda array, **rest: drawn.update(array=array),
                                 set_xlabel=lambda text: None, set_ylabel=lambda text: None)
    module = types.ModuleType("matplotlib")
    module.pyplot = types.SimpleNamespace(gca=lambda: axes)
    monkeypatch.setitem(sys.modules, "matplotlib", module)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", module.pyplot)
    assert m.per_head([m.all_(), m.causal()]).show(6, head=1) is axes
    np.testing.assert_array_equal(drawn["array"], np.tri(6, dtype=bool))
    m.prefix([1, 4]).show(3, 6, batch=1)
    np.testing.assert_array_equal(drawn["array"], np.tile(np.arange(6) < 4, (3, 1)))


# ---- Other libraries.

def document_of(n):
    return np.searchsorted([4, 7, 10], np.arange(n), side="right")


def test_flashmask_of_ten_tokens(message):
    """The examples of its paper (Wang and others, 2024)."""
    row, key = np.ogrid[:10, :10]
    own = document_of(10)
    cases = [([4] * 4 + [7] * 3 + [10] * 3, (key <= row) & (own[:, None] == own)),
             ([10] * 4 + [7] * 3 + [10] * 3, (key <= row) & ((key < 4) | (own[:, None] == own))),
             ([10, 4, 5, 6, 7, 8, 9, 10, 10, 10], (key <= row) & ((key == 0) | (row - key < 3)))]
    for starts, expected in cases:
        mask = m.from_flashmask(np.array(starts).reshape(1, 1, 10, 1), causal=True)
        np.testing.assert_array_equal(compare(message, mask, (1, 1, 10, 10))[0, 0], expected)
        ended = np.stack([starts, [10] * 10], axis=1)
        np.testing.assert_array_equal(m.from_flashmask(ended, causal=True).to_dense(1, 1, 10, 10)[0, 0], expected)
    below, above = np.array([3, 10, 10, 5] + [10] * 6), np.array([0, 1, 2, 0] + [4] * 6)
    expected = (row < below) & (row >= above)
    mask = m.from_flashmask(np.stack([below, above], 1), causal=False)
    np.testing.assert_array_equal(compare(message, mask, (1, 1, 10, 10))[0, 0], expected)


def test_flashmask_of_grouped_heads(message, rng):
    edges = np.sort(rng.integers(0, 13, (2, 2, 12, 2, 2)), axis=4).reshape(2, 2, 12, 4)
    dense = compare(message, m.from_flashmask(edges, causal=False, q_heads=4), (2, 4, 12, 12))
    row = np.arange(12)[:, None]
    for b in range(2):
        for h in range(4):
            e = edges[b, h // 2]
            hidden = ((row >= e[:, 0]) & (row < e[:, 1])) | ((row >= e[:, 2]) & (row < e[:, 3]))
            np.testing.assert_array_equal(dense[b, h], ~hidden)
    for bad, said in ((dict(q_heads=3), "a multiple of the 2 heads"), (dict(), "a multiple of the 2 heads")):
        with pytest.raises(attnd.InvalidArgument, match=said):
            m.from_flashmask(edges, causal=False, **bad)
    with pytest.raises(attnd.InvalidArgument, match="startend_row_indices: expected shape .* 1 or 2"):
        m.from_flashmask(edges, causal=True, q_heads=4)


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_endpoints(message, rng, count):
    ends = np.sort(rng.integers(0, 13, (2, count, 9)), axis=1)
    dense = compare(message, m.from_endpoints(ends), (1, 2, 9, 12))
    for h in range(2):
        for i in range(9):
            f = [0, *ends[h, :, i]]
            seen = [any(f[n] <= j < f[n + 1] for n in range(0, count + 1, 2)) for j in range(12)]
            np.testing.assert_array_equal(dense[0, h, i], seen)


def test_endpoints_of_packed_sequences(message):
    ends = np.array([[[1, 2, 3, 4, 1, 2, 1, 2, 3]]])  # causal, of 4, 2 and 3 rows
    mask = m.from_endpoints(ends, cu_seqlens=[0, 4, 6, 9])
    dense = compare(message, mask, (3, 1, 4, 4))
    for b, length in enumerate((4, 2, 3)):
        np.testing.assert_array_equal(dense[b, 0, :length], np.tri(4, dtype=bool)[:length])
        assert not dense[b, 0, length:].any()
    with pytest.raises(attnd.InvalidArgument, match="cu_seqlens: expected at least 2 entries, to mask_func's 9 rows"):
        m.from_endpoints(ends, cu_seqlens=[0, 4, 6])


def test_slices(message):
    mask = m.from_slices([(0, 4), (4, 8), (2, 6)], [(0, 4), (2, 8), (0, 3)], [1, "bi_causal", "inv_causal"])
    row, key = np.ogrid[:8, :8]
    expected = (row < 4) & (key <= row) & (key < 4)
    expected |= (row >= 4) & (key >= 2) & (key <= row) & (key - 2 >= row - 4)
    expected |= (row >= 2) & (row < 6) & (key < 3) & (key >= row - 2)
    np.testing.assert_array_equal(compare(message, mask, (1, 1, 8, 8))[0, 0], expected)
    with pytest.raises(attnd.InvalidArgument, match=r"types\[0\]: expected 0..3, got 4"):
        m.from_slices([(0, 4)], [(0, 4)], [4])


def test_block_sparse_rows(message, rng):
    layout = rng.random((3, 4)) < 0.6
    layout[1] = False
    columns = np.concatenate([rng.permutation(np.flatnonzero(row)) for row in layout]).astype(int)
    indptr = np.concatenate([[0], np.cumsum(layout.sum(1))])
    scores = rng.random((len(columns), 5, 3)) < 0.5
    expected, full = np.zeros((2, 15, 12), bool)
    for r in range(3):
        for n in range(indptr[r], indptr[r + 1]):
            at = slice(5 * r, 5 * r + 5), slice(3 * columns[n], 3 * columns[n] + 3)
            expected[at], full[at] = scores[n], True
    mask = m.from_bsr(indptr, columns, 5, 3, 11, scores)
    np.testing.assert_array_equal(compare(message, mask, (1, 1, 14, 11))[0, 0], expected[:14, :11])
    mask = m.from_bsr(indptr, columns, 5, 3, 12)
    np.testing.assert_array_equal(compare(message, mask, (1, 1, 15, 12))[0, 0], full)
    for indices, said in (([0, 0], "ascending in each row: above 0"), ([0, 4], r"0\.\.3")):
        with pytest.raises(attnd.InvalidArgument, match=f"blocks indices: expected {said}"):
            m.from_bsr([0, 2], indices, 5, 3, 12)


class Csr:
    def __init__(self, dense):
        self.shape = dense.shape
        self.indptr = np.concatenate([[0], np.cumsum(dense.sum(1))])
        self.indices = np.nonzero(dense)[1].astype(np.int64)


@pytest.mark.parametrize("kind, dense", [
    ("row_intervals", np.tri(40, dtype=bool)),
    ("row_intervals", np.zeros((7, 9), bool)),
    ("row_intervals", np.abs(np.subtract.outer(np.arange(300), np.arange(300))) % 290 < 5),
    ("row_runs", np.subtract.outer(np.arange(50), np.arange(60)) % 7 == 0),
    ("bits", np.random.default_rng(3).random((30, 40)) < 0.5),
])
def test_sparse_rows(message, kind, dense):
    mask = m.from_csr(Csr(dense))
    assert parse(message, mask, (1, 1, *dense.shape)).pattern[0].WhichOneof("kind") == kind
    np.testing.assert_array_equal(mask.to_dense(1, 1, *dense.shape)[0, 0], dense)


def test_sparse_rows_of_anything(rng):
    for _ in range(60):
        dense = rng.random((number(rng, 1, 30), number(rng, 1, 30))) < rng.random()
        mask = m.from_csr(Csr(dense))
        np.testing.assert_array_equal(mask.to_dense(1, 1, *dense.shape)[0, 0], dense)


DENSE = {
    "Window": [np.tri(40, dtype=bool), np.tri(40, k=3, dtype=bool) & ~np.tri(40, k=-9, dtype=bool), np.ones((7, 7), bool),
               ~np.tri(40, k=-5, dtype=bool)],
    "RowIntervals": [np.arange(900) < np.random.default_rng(3).integers(0, 900, (300, 1)),
                     np.abs(np.arange(900) - np.random.default_rng(4).integers(0, 900, (300, 1))) % 700 < 20],
    "Blocks": [np.zeros((300, 300), bool), np.tri(300, k=-1, dtype=bool), np.tri(300, 310, dtype=bool),
               np.kron(np.random.default_rng(1).random((6, 6)) < 0.4, np.tri(64, dtype=bool))[:370, :361]],
    "Bits": [np.random.default_rng(2).random((130, 70)) < 0.5],
}


@pytest.mark.parametrize("kind", DENSE)
def test_arrays_become_what_is_smallest(message, kind):
    for dense in DENSE[kind]:
        mask = m.from_dense(dense)
        assert type(mask).__name__ == kind
        np.testing.assert_array_equal(mask.to_dense(1, 1, *dense.shape, align=0)[0, 0], dense)
        assert len(serialize(mask, Sizes(1, 1, *dense.shape))) <= dense.size // 8 + len(dense) + 40
    both = np.stack([np.tri(9, dtype=bool), np.eye(9, dtype=bool)])
    np.testing.assert_array_equal(compare(message, m.from_dense(both), (2, 2, 9, 9))[1], both)


def test_any_array_is_what_it_shows(rng):
    for _ in range(40):
        shape = (number(rng, 1, 150),) * 2 if rng.random() < 0.5 else (number(rng, 1, 150), number(rng, 1, 150))
        dense = rng.random(shape) < rng.random() ** 3
        dense = dense if rng.random() < 0.5 else np.logical_or.accumulate(dense, axis=1)
        np.testing.assert_array_equal(m.from_dense(dense).to_dense(1, 1, *dense.shape, align=0)[0, 0], dense)


def deepspeed(name, blocks, **fields):
    """Layouts cell by cell, from the descriptions of DeepSpeed's documentation."""
    uni = fields.get("attention") == "unidirectional"
    layout = np.zeros((blocks, blocks), bool)
    for r in range(blocks):
        for c in range(blocks):
            if name == "fixed":
                local, wide = fields["num_local_blocks"], fields["num_global_blocks"]
                near = r // local == c // local
                last = blocks // local * local
                begins = [b + local - wide for b in range(0, last, local)]
                if last < blocks:
                    begins.append(min(last + local - wide, blocks - wide))
                far = any(b <= c < b + wide and (not uni or r >= b) for b in begins)
                flat = fields.get("horizontal_global_attention") and any(b <= r < b + wide for b in begins)
                layout[r, c] = (near and (not uni or c <= r)) or far or bool(flat)
            else:
                half = fields["num_sliding_window_blocks"] // 2
                marked = fields.get("global_block_indices", [])
                layout[r, c] = (abs(r - c) <= half or r in marked or c in marked) and (not uni or c <= r)
    return layout


@pytest.mark.parametrize("mode, fields", [
    ("fixed", dict(num_local_blocks=4, num_global_blocks=1)),
    ("fixed", dict(num_local_blocks=4, num_global_blocks=2, attention="unidirectional")),
    ("fixed", dict(num_local_blocks=3, num_global_blocks=1, horizontal_global_attention=True)),
    ("bslongformer", dict(num_sliding_window_blocks=3, global_block_indices=[0, 5])),
    ("bslongformer", dict(num_sliding_window_blocks=5, global_block_indices=[2], attention="unidirectional")),
    ("local_sliding_window", dict(num_sliding_window_blocks=5, attention="unidirectional")),
], ids=str)
def test_deepspeed_layouts(mode, fields):
    for blocks in (9, 12, 13, 14):
        dense = m.from_deepspeed(dict(mode=mode, block=4, **fields), 4 * blocks).to_dense(1, 1, 4 * blocks, 4 * blocks)
        expected = deepspeed(mode, blocks, **fields)
        np.testing.assert_array_equal(dense[0, 0, ::4, ::4], expected)
        np.testing.assert_array_equal(dense[0, 0], expected.repeat(4, 0).repeat(4, 1))


def test_deepspeed_heads_and_variable_windows():
    config = dict(mode="fixed", block=2, num_heads=4, different_layout_per_head=True, num_local_blocks=4,
                  num_global_blocks=1, num_different_global_patterns=4)
    dense = m.from_deepspeed(config, 16).to_dense(1, 4, 16, 16)[0, :, ::2, ::2]
    for h in range(4):
        assert [c for c in range(8) if dense[h, :, c].all()] == [3 - h, 7 - h]
    config = dict(mode="variable", block=2, local_window_blocks=[1, 3], global_block_indices=[5],
                  global_block_end_indices=[7], attention="unidirectional")
    dense = m.from_deepspeed(config, 18).to_dense(1, 1, 18, 18)[0, 0, ::2, ::2]
    window = np.array([0, 1, 1, 1, 2, 2, 2, 3, 3])
    row, column = np.ogrid[:9, :9]
    expected = ((window[:, None] == window) & (column <= row)) | ((column >= 5) & (column < 7) & (row >= 5))
    np.testing.assert_array_equal(dense, expected)
    assert m.count(m.from_deepspeed(dict(mode="dense", block=4), 16), 16) == 256
    with pytest.raises(attnd.Unimplemented, match="config: expected no random blocks"):
        m.from_deepspeed(dict(mode="bigbird", block=4), 16)
    with pytest.raises(attnd.InvalidArgument, match="length: expected a multiple of the block 16, got 40"):
        m.from_deepspeed(dict(mode="fixed"), 40)

    class Config:
        block = 4

        def make_layout(self, length):
            return np.stack([np.tri(length // 4), np.eye(length // 4)]).astype(int)
    dense = m.from_deepspeed(Config(), 12).to_dense(1, 2, 12, 12)[0, :, ::4, ::4]
    np.testing.assert_array_equal(dense, np.stack([np.tri(3, dtype=bool), np.eye(3, dtype=bool)]))


def test_no_array_of_all_scores_is_made():
    """A million rows and keys: described, sized and serialised in well under a second and a megabyte."""
    n = 1 << 20
    mask = (m.window(255, 255) | m.global_(cols=[(0, 64)]) | m.random_blocks(64, 3, seed=1)) & m.causal()
    assert len(serialize(mask, Sizes(8, 32, n, n))) < 100
    assert math.isclose(m.count(m.window(255, 0) & m.causal(), 1 << 12, 1 << 12), (1 << 12) * 256 - 255 * 256 / 2)
