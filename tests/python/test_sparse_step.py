"""A sparse step with zero-rest against sparse rows written out (SDDMM, softmax with the rest, SpMM), whose own gradients
are held to finite differences; and that the comparison tells four mistakes."""
import numpy as np
import pytest

import attnd
from attnd import masks

ROWS, BLOCK, DIM = 96, 16, 24
TENSORS = [np.random.default_rng(7 + n).standard_normal((2, 2, ROWS, DIM)).astype(np.float32) for n in range(4)]
BOUND = 1e-6  # of a tensor's largest number


def pattern(seed):
    layout = np.random.default_rng(seed).random((ROWS // BLOCK,) * 2) < 0.4
    layout[2] = False  # rows that keep nothing
    return layout


def rows_of(layout):
    """(row pointers, columns): of each row the keys that its blocks keep."""
    kept = np.kron(layout, np.ones((BLOCK, BLOCK), bool))
    return np.concatenate([[0], np.cumsum(kept.sum(1))]), np.nonzero(kept)[1]


def sparse_head(q, k, v, layout, rest):
    """o and probabilities of one head in float64; `rest` pruned keys of a row count e^0 in its sum."""
    pointers, columns = rows_of(layout)
    o, p = np.zeros((ROWS, DIM)), np.zeros(len(columns))
    for row in range(ROWS):
        span = slice(pointers[row], pointers[row + 1])
        keys = columns[span]
        if len(keys) == 0:
            continue
        scores = k[keys] @ q[row] / DIM ** 0.5                                  # SDDMM
        top = max(scores.max(), 0)
        weights = np.exp(scores - top)
        p[span] = weights / (weights.sum() + rest(len(keys)) * np.exp(-top))  # softmax
        o[row] = p[span] @ v[keys]                                            # SpMM
    return o, p


def sparse_gradients(q, k, v, d_o, layout, rest):
    pointers, columns = rows_of(layout)
    _, p = sparse_head(q, k, v, layout, rest)
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for row in range(ROWS):
        span = slice(pointers[row], pointers[row + 1])
        keys, own = columns[span], p[span]
        d_p = v[keys] @ d_o[row]
        d_s = own * (d_p - own @ d_p) / DIM ** 0.5
        d_q[row] = d_s @ k[keys]
        np.add.at(d_k, keys, np.outer(d_s, q[row]))
        np.add.at(d_v, keys, np.outer(own, d_o[row]))
    return d_q, d_k, d_v


def pruned(kept):
    return ROWS - kept


def by_rows(layout, rest=pruned):
    """o, dQ, dK and dV of all heads."""
    q, k, v, d_o = [t.astype(np.float64) for t in TENSORS]
    found = [np.zeros_like(q) for _ in range(4)]
    for at in np.ndindex(q.shape[:2]):
        found[0][at] = sparse_head(q[at], k[at], v[at], layout, rest)[0]
        for tensor, part in zip(found[1:], sparse_gradients(q[at], k[at], v[at], d_o[at], layout, rest)):
            tensor[at] = part
    return found


@pytest.fixture(scope="module")
def step(daemon):
    """o, dQ, dK and dV from the daemon, by pattern 1."""
    q, k, v, d_o = TENSORS
    with attnd.connect(daemon.address) as client:
        r = client.forward(q, k, v, mask=masks.blocks(pattern(1), BLOCK), zero_rest=True)
        return [r.out, *client.backward(d_o, r)]


def distance(found, wanted):
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, wanted))


def test_step_is_that_of_sparse_rows(step):
    assert distance(step, by_rows(pattern(1))) < BOUND


@pytest.mark.parametrize("layout,rest", [(pattern(1), lambda kept: 0), (pattern(1), lambda kept: ROWS),
                                         (pattern(1).T, pruned), (pattern(2), pruned)],
                         ids=["rest ignored", "rest of all keys", "pattern transposed", "another layer's pattern"])
def test_mistakes_are_seen(step, layout, rest):
    assert distance(step, by_rows(layout, rest)) > 100 * BOUND


def test_gradients_of_sparse_rows_by_differences():
    q, k, v, d_o = [t[0, 0].astype(np.float64) for t in TENSORS]
    layout, small = pattern(1), 1e-5
    gradients = sparse_gradients(q, k, v, d_o, layout, pruned)
    random = np.random.default_rng(3)
    for tensor, gradient in zip((q, k, v), gradients):
        for _ in range(6):
            at = random.integers(ROWS), random.integers(DIM)
            kept, ends = tensor[at], []
            for way in (small, -small):
                tensor[at] = kept + way
                ends.append((sparse_head(q, k, v, layout, pruned)[0] * d_o).sum())
            tensor[at] = kept
            assert gradient[at] == pytest.approx((ends[0] - ends[1]) / (2 * small), abs=1e-7)
