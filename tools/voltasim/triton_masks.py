"""Block-sparse attention forward in Triton, as one writes it by hand: what volta_triton.py times beside the product.

A block of queries has two lists of key blocks: those that it sees whole, and those where RULE hides something. One program
is one block of one head; each row sees at least one key. Keys come transposed by pointers, as mma.m8n8k4 of Triton wants.
"""
import triton
import triton.language as tl


@triton.jit
def shown(rows, keys, first, table, n, RULE: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Computes a tile's mask: rows [M, 1], keys [1, N] from `first` on. SIZE: of a window, half a band, a stride, a
    block."""
    if RULE == "causal":
        visible = keys <= rows
    elif RULE == "window":
        visible = (keys <= rows) & (rows - keys <= SIZE)
    elif RULE == "band":
        visible = (rows - keys <= SIZE) & (keys - rows <= SIZE)
    elif RULE == "strided":
        visible = (rows - keys) % SIZE == 0
    elif RULE == "blocked":  # the own block of SIZE and the one before
        visible = (rows // SIZE - keys // SIZE <= 1) & (rows // SIZE >= keys // SIZE)
    else:  # "listed": a band, and a table of blocks
        at = table + rows // SIZE * (n // SIZE) + first // SIZE
        listed = tl.load(at) != 0
        if BLOCK_N > SIZE:  # two blocks
            listed = ((keys - first < SIZE) & listed) | ((keys - first >= SIZE) & (tl.load(at + 1) != 0))
        visible = ((rows - keys <= SIZE) & (keys - rows <= SIZE)) | listed
    return visible


@triton.jit
def add_tile(s, v_at, m, l, acc, scale_log2):
    """The row recurrence: (m, l, acc) with a tile more."""
    top = tl.maximum(m, tl.max(s, 1) * scale_log2)
    p = tl.math.exp2(s * scale_log2 - tl.expand_dims(top, 1))
    shrink = tl.math.exp2(m - top)
    l = l * shrink + tl.sum(p, 1)
    acc = acc * tl.expand_dims(shrink, 1)
    acc += tl.dot(p.to(tl.float16), tl.load(v_at))
    return top, l, acc


@triton.jit
def forward(Q, K, V, O, Lse, full_from, full_at, partial_from, partial_at, table, n, scale_log2,
            RULE: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Q, K, V, O: float16 [heads, n, D]; Lse: float32 [heads, n]; scale_log2: scale · log2(e)."""
    block, head = tl.program_id(0), tl.program_id(1)
    rows, keys, columns = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    base = head * n * D
    k_at = K + base + tl.expand_dims(keys, 0) * D + tl.expand_dims(columns, 1)
    v_at = V + base + tl.expand_dims(keys, 1) * D + tl.expand_dims(columns, 0)
    q = tl.load(Q + base + tl.expand_dims(rows, 1) * D + tl.expand_dims(columns, 0))
    m = tl.full([BLOCK_M], -1e30, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for at in range(tl.load(full_from + block), tl.load(full_from + block + 1)):
        first = tl.load(full_at + at) * BLOCK_N
        k = tl.load(k_at + first * D)
        s = tl.dot(q, k)
        m, l, acc = add_tile(s, v_at + first * D, m, l, acc, scale_log2)
    for at in range(tl.load(partial_from + block), tl.load(partial_from + block + 1)):
        first = tl.load(partial_at + at) * BLOCK_N
        k = tl.load(k_at + first * D)
        s = tl.dot(q, k)
        visible = shown(tl.expand_dims(rows, 1), first + tl.expand_dims(keys, 0), first, table, n, RULE, SIZE, BLOCK_N)
        s = tl.where(visible, s, -1e30)
        m, l, acc = add_tile(s, v_at + first * D, m, l, acc, scale_log2)
    o = acc / tl.expand_dims(l, 1)
    tl.store(O + base + tl.expand_dims(rows, 1) * D + tl.expand_dims(columns, 0), o.to(tl.float16))
    tl.store(Lse + head * n + rows, (m + tl.math.log2(l)) * 0.6931471805599453)
