"""Cycle-level simulation of one SM: sub-cores, scoreboards, pipes, data path, barriers."""
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace

from . import isa

NEVER = 1 << 60
STALLS = ("issue", "fixed", "hmma", "lds", "shfl", "ldg", "sts", "xu", "other_sb", "barrier",
          "branch", "fetch", "pipe_busy", "mio_queue", "not_selected")
_SBKIND = {isa.HMMA: "hmma", isa.LDS: "lds", isa.SHFL: "shfl", isa.LDG: "ldg", isa.STS: "sts",
           isa.XUOP: "xu"}


@dataclass
class Op:
    """An instruction prepared for simulation."""
    pipe: int
    interval: int
    kind: str
    stall: int
    yield_hint: bool
    wsb: int
    rsb: int
    waits: tuple
    latency: int = 0
    chain: int = 0            # latency seen by a waiting HMMA
    data: float = 0.0         # SM cycles on the shared data path
    l2: float = 0.0           # SM cycles on the L2 port
    hbm: float = 0.0          # SM cycles of its share of HBM
    bar_id: int = 0
    bar_warps: int = 0
    bar_wait: bool = True
    is_hmma: bool = False


@dataclass
class Result:
    cycles: int = 0
    marks: dict = field(default_factory=dict)      # (warp, iteration) -> cycle
    cta_end: list = field(default_factory=list)
    stalls: dict = field(default_factory=dict)     # instruction index -> {reason: cycles}
    issued: int = 0


class Conflicts:
    """Bank-conflict factors by address or by opcode prefix (default 1)."""

    def __init__(self, table=None):
        table = table or {}
        self.addr = {int(k, 16): float(v) for k, v in table.get("by_address", {}).items()}
        self.opcode = {k: float(v) for k, v in table.get("by_opcode", {}).items()}

    def factor(self, ins):
        if ins.addr in self.addr:
            return self.addr[ins.addr]
        best = max((k for k in self.opcode if ins.opcode.startswith(k)), key=len, default=None)
        return self.opcode[best] if best else 1.0


def _memory_cost(ins, cls, m, conflicts, hbm_fraction, moved):
    """(data path cycles, L2 cycles, HBM cycles) of one warp instruction."""
    if cls.kind in (isa.LDS, isa.STS):
        return max(1, isa.access_bytes(ins.opcode) // 4) * conflicts.factor(ins), 0.0, 0.0
    if cls.kind == isa.SHFL:
        return 1.0, 0.0, 0.0
    if cls.kind == isa.LOCAL:
        return max(1, isa.access_bytes(ins.opcode) // 4), 0.0, 0.0
    if cls.kind in (isa.LDG, isa.STG, isa.ATOM):
        size = isa.access_bytes(ins.opcode) * 32
        _, of_l2, of_hbm = moved or (0, size, size * hbm_fraction)
        return max(1, size // 128), of_l2 / m.l2_bytes_per_clk_sm, of_hbm / m.hbm_bytes_per_clk_sm
    return 0.0, 0.0, 0.0


def _latencies(ins, cls, m, hbm_fraction, moved):
    """(result latency, latency towards a waiting HMMA)."""
    if cls.kind == isa.HMMA:
        _, f16, _ = isa.hmma_shape(ins.opcode)
        return m.hmma_result, m.hmma_f16_chain if f16 else m.hmma_f32_chain
    table = {isa.LDS: m.lds_latency, isa.SHFL: m.shfl_latency, isa.STS: 0, isa.STG: 0,
             isa.LDG: m.ldg_latency + int(hbm_fraction * m.hbm_extra_latency),
             isa.ATOM: m.atom_latency, isa.LDC: m.ldc_latency, isa.LOCAL: m.local_latency,
             isa.MEMBAR: m.membar_latency if ".GPU" in ins.opcode or ".SYS" in ins.opcode else 20,
             isa.XUOP: m.xu_latency, isa.F64: m.fp64_latency, isa.S2R: m.s2r_latency}
    lat = table.get(cls.kind, 0)
    if cls.kind == isa.LDG and moved:
        of_l1, of_l2, of_hbm = moved
        beyond = of_l2 / (of_l1 + of_l2) if of_l2 else 0
        of_memory = of_hbm / (of_l1 + of_l2) if of_l2 else 0
        lat = int(m.local_latency * (1 - beyond) + m.ldg_latency * beyond + m.hbm_extra_latency * of_memory)
    return lat, lat


def with_barrier(op, number):
    """The op of a barrier whose number came from a register."""
    return replace(op, bar_id=number)


def _bar_args(ins, op):
    """Barrier id, participating warps (0 = whole CTA), does the warp wait?"""
    args = [a.strip() for a in ins.operands.split(",")]
    op.bar_id = int(args[0], 16) if args and args[0].startswith("0x") else 0
    if len(args) > 1 and args[1].startswith("0x"):
        op.bar_warps = int(args[1], 16) // 32
    op.bar_wait = ".ARV" not in ins.opcode


def prepare(listing, m, conflicts=None, hbm_fraction=0.0, traffic=None):
    """Ops of a listing, then the same ops predicated off; and the unknown opcodes.

    `traffic`: {address: (bytes of the L1, of the L2, of these HBM's)} of global accesses; others move all lanes' bytes.
    """
    conflicts = conflicts or Conflicts()
    pipe_no = {p: i for i, p in enumerate(isa.PIPES)}
    ops, unknown = [], {}
    for ins in listing.instrs:
        cls, known = isa.classify(ins.opcode)
        if not known:
            unknown.setdefault(ins.opcode, []).append(ins.addr)
        c = ins.ctrl
        interval = m.mio_interval if cls.pipe == isa.MIO else cls.interval
        kind = cls.kind
        moved = (traffic or {}).get(ins.addr)
        data, l2, hbm = _memory_cost(ins, cls, m, conflicts, hbm_fraction, moved)
        if ins.pred == "!PT":                         # never executes: takes an issue slot only
            kind, data, l2, hbm = isa.FIXED, 0.0, 0.0, 0.0
        lat, chain = _latencies(ins, cls, m, hbm_fraction, moved)
        op = Op(pipe_no[cls.pipe], interval, kind, max(1, c.stall), c.yield_hint,
                c.write_sb, c.read_sb, tuple(i for i in range(6) if c.wait >> i & 1),
                lat, chain, data, l2, hbm)
        if kind == isa.HMMA:
            _, f16, _ = isa.hmma_shape(ins.opcode)
            op.interval = m.hmma_f16_interval if f16 else m.hmma_f32_interval
            op.is_hmma = True
        elif kind == isa.BAR:
            _bar_args(ins, op)
        ops.append(op)
    off = [replace(o, kind=isa.FIXED, data=0.0, l2=0.0, hbm=0.0, latency=0, chain=0) for o in ops]
    return ops + off, unknown


class Warp:
    __slots__ = ("wid", "cta", "sub", "pos", "ready", "base", "why", "sb", "sbh", "sbk",
                 "prev", "iters", "age", "l0", "path", "code", "header")

    def __init__(self, wid, cta, sub, t, age, track):
        self.wid, self.cta, self.sub, self.age = wid, cta, sub, age
        self.path, self.code, self.header = track.path, track.code, track.header
        self.pos, self.ready, self.base, self.why, self.prev = 0, t, t, "fixed", t - 1
        self.sb, self.sbh, self.sbk = [0] * 6, [0] * 6, ["other_sb"] * 6
        self.iters = 0


class Track:
    """Describes what one role of a CTA's warps executes: its path, the code index of each step, its loop header."""

    def __init__(self, path, header, num_instrs):
        self.path, self.header = path, header
        self.code = [i % num_instrs for i in path]


class Sim:
    """One SM running CTAs whose warps follow one path, or one per role.

    `path` is a list of instruction indices, or a list of (path, loop header), one entry per warp of a CTA.
    """

    def __init__(self, ops, path, m, warps_per_cta, resident, total=None, header=-1,
                 scheduler="gto", stagger=0, window=None, num_instrs=None):
        self.ops, self.m = ops, m
        self.num_instrs = num_instrs or len(ops) // 2
        self.wpc, self.resident, self.total = warps_per_cta, resident, total or resident
        self.scheduler, self.window = scheduler, window
        self.stagger = stagger
        self.tracks = self._tracks(path, header)
        self.warps = [[] for _ in range(m.subcores)]
        self.next_t = [0] * m.subcores
        self.pipe_free = [[0] * len(isa.PIPES) for _ in range(m.subcores)]
        self.queue = [deque() for _ in range(m.subcores)]
        self.last = [None] * m.subcores
        self.data_free = 0.0
        self.l2_free = self.port_free = self.hbm_free = 0.0
        self.bars = {}
        self.cta_left = {}
        self.launched = 0
        self.age = 0
        self.res = Result()
        self.mio = isa.PIPES.index(isa.MIO)
        self.l0 = [OrderedDict() for _ in range(m.subcores)]
        self.fetch_free = 0.0
        self.line_cycles = 128 / m.fetch_bytes_per_clk if m.fetch_bytes_per_clk else 0
        self.by_cta = {}
        self.block = {}
        self._last_yield = [False] * m.subcores

    def _tracks(self, path, header):
        """One Track per warp of a CTA; warps of one role share theirs."""
        n = self.num_instrs
        if not path or not isinstance(path[0], tuple):
            return [Track(path, header, n)] * self.wpc
        shared = {id(p): Track(p, h, n) for p, h in path}
        return [shared[id(p)] for p, _ in path]

    # -- CTA life ---------------------------------------------------------
    def _launch(self, t):
        cta = self.launched
        self.launched += 1
        self.cta_left[cta] = self.wpc
        self.by_cta[cta] = []
        shift = (cta * self.wpc) % self.m.subcores
        for w in range(self.wpc):
            sub = (w + shift) % self.m.subcores
            warp = Warp(cta * self.wpc + w, cta, sub, t, self.age, self.tracks[w])
            self.age += 1
            self.warps[warp.sub].append(warp)
            self.by_cta[cta].append(warp)
            self.next_t[warp.sub] = min(self.next_t[warp.sub], t)

    def _finish(self, warp, t):
        self.warps[warp.sub].remove(warp)
        self.by_cta[warp.cta].remove(warp)
        self.cta_left[warp.cta] -= 1
        if self.cta_left[warp.cta] == 0:
            self.res.cta_end.append((warp.cta, t))
            if self.launched < self.total:
                self._launch(t + self.m.cta_launch)
        else:
            for key in [k for k in self.bars if k[0] == warp.cta]:
                self._release_if_full(key, t)

    # -- barrier ----------------------------------------------------------
    def _arrive(self, warp, op, t):
        key = (warp.cta, op.bar_id)
        state = self.bars.setdefault(key, [0, [], op.bar_warps])
        state[0] += 1
        if op.bar_wait:
            state[1].append(warp)
            warp.base, warp.why, warp.ready = t + op.stall, "barrier", NEVER
        self._release_if_full(key, t)

    def _release_if_full(self, key, t):
        count, waiting, need = self.bars[key]
        if count < (need or self.cta_left[key[0]]):
            return
        for w in waiting:
            w.ready = max(w.base, t + self.m.barrier_latency)
            self._apply_waits(w)
            self.next_t[w.sub] = min(self.next_t[w.sub], w.ready)
        del self.bars[key]

    # -- dependences ------------------------------------------------------
    def _apply_waits(self, w):
        op = self.ops[w.path[w.pos]]
        times = w.sbh if op.is_hmma else w.sb
        for i in op.waits:
            if times[i] > w.ready:
                w.ready, w.why = times[i], w.sbk[i]

    def _beyond_l1(self, op, start):
        """Time the L2, and HBM where it is asked, have served the op: the port, then average bandwidths."""
        m = self.m
        self.port_free = max(self.port_free, start) + op.l2 * m.l2_bytes_per_clk_sm / m.l2_port_bytes_per_clk
        self.l2_free = max(self.l2_free, start) + op.l2
        done = max(self.port_free, self.l2_free - m.l2_burst_bytes / m.l2_bytes_per_clk_sm)
        if op.hbm:
            self.hbm_free = max(self.hbm_free, start) + op.hbm
            done = max(done, self.hbm_free - m.l2_burst_bytes / m.hbm_bytes_per_clk_sm)
        return done

    def _post(self, w, op, t):
        """Pipe side effects and scoreboard completion times of an issued op."""
        m = self.m
        if op.pipe == self.mio:
            start = max(t + m.mio_latency, self.data_free)
            if op.data:
                self.data_free = start + op.data
            if op.kind not in (isa.S2R, isa.LDC, isa.MEMBAR):
                self.queue[w.sub].append(start)
            done = start + op.data + op.latency
            if op.l2:
                done = max(done, self._beyond_l1(op, start) + op.latency)
            moved = op.data if op.kind in (isa.STS, isa.STG, isa.ATOM) else 0
            release = start + moved + m.read_release
        else:
            done = t + op.latency + (op.interval if op.kind == isa.XUOP else 0)
            release = t + 4
        if op.wsb < 7:
            i, d = op.wsb, int(done) + m.scoreboard_wakeup
            dh = t + op.chain if op.is_hmma else d
            if d >= w.sb[i]:
                w.sb[i], w.sbk[i] = d, _SBKIND.get(op.kind, "other_sb")
            w.sbh[i] = max(w.sbh[i], dh)
        if op.rsb < 7:
            i, d = op.rsb, int(release) + m.scoreboard_wakeup
            if d >= w.sb[i]:
                w.sb[i], w.sbk[i] = d, "sts" if op.pipe == self.mio else "other_sb"
            w.sbh[i] = max(w.sbh[i], d)

    # -- instruction supply ----------------------------------------------
    def _line(self, sub, line, t):
        """Time a code line is usable in the sub-core's L0 cache (LRU, 8 instructions per line)."""
        cache = self.l0[sub]
        if line in cache:
            cache.move_to_end(line)
            return cache[line]
        start = max(t, self.fetch_free)
        self.fetch_free = start + self.line_cycles
        cache[line] = int(start + self.line_cycles + self.m.fetch_latency)
        if len(cache) > self.m.l0_lines:
            cache.popitem(last=False)
        return cache[line]

    def _fetch(self, w, line, t):
        """The warp enters a new line; the next two lines are prefetched."""
        at = self._line(w.sub, line, t)
        self._line(w.sub, line + 1, t)
        self._line(w.sub, line + 2, t)
        if at > w.ready:
            w.ready, w.why = at, "fetch"

    # -- issue ------------------------------------------------------------
    def _issue(self, w, t, busy_until):
        op, idx = self.ops[w.path[w.pos]], w.code[w.pos]
        if idx == w.header:
            self.res.marks[(w.wid, w.iters)] = t
            w.iters += 1
        if self.window is None or self.window[0] < w.iters <= self.window[1]:
            self._account(w, idx, t, busy_until)
        self.res.issued += 1
        self.pipe_free[w.sub][op.pipe] = t + op.interval
        w.prev = t
        w.pos += 1
        if w.pos == len(w.path):
            self._finish(w, t)
            return
        self._post(w, op, t)
        if op.kind == isa.BAR:
            self._arrive(w, op, t)
            return
        jumped = w.code[w.pos] != idx + 1
        w.base = w.ready = t + (max(op.stall, self.m.branch_latency) if jumped else op.stall)
        w.why = "branch" if jumped else "fixed"
        if op.kind == isa.MEMBAR and op.latency:
            w.base = w.ready = t + op.latency
        if self.line_cycles and w.code[w.pos] >> 3 != idx >> 3:
            self._fetch(w, w.code[w.pos] >> 3, t)
        self._apply_waits(w)

    def _account(self, w, idx, t, busy_until):
        s = self.res.stalls.setdefault(idx, {})

        def add(reason, n):
            if n > 0:
                s[reason] = s.get(reason, 0) + n
        add("issue", 1)
        first = "branch" if w.why == "branch" else "fixed"
        add(first, w.base - w.prev - 1)
        if w.why not in ("fixed", "branch"):
            add(w.why, w.ready - w.base)
        late = t - w.ready
        if late > 0:
            kind, until = busy_until
            add(kind if until >= t else "not_selected", late)

    def _blocked_until(self, w, t):
        """(first cycle the warp's next op can enter its pipe, reason)."""
        op = self.ops[w.path[w.pos]]
        free = self.pipe_free[w.sub][op.pipe]
        if op.pipe == self.mio:
            q = self.queue[w.sub]
            while q and q[0] <= t:
                q.popleft()
            if len(q) >= self.m.mio_queue and q[0] > free:
                return int(q[0]) + 1, "mio_queue"
        return free, "pipe_busy"

    def _order(self, sub):
        warps = self.warps[sub]
        if self.scheduler == "lrr":
            last = self.last[sub]
            k = next((i for i, w in enumerate(warps) if w.wid > last), 0) if last is not None else 0
            return warps[k:] + warps[:k]
        last = self.last[sub]
        for i, w in enumerate(warps):
            if w.wid == last:
                if self._last_yield[sub]:
                    return warps[:i] + warps[i + 1:] + [w]
                return [w] + warps[:i] + warps[i + 1:]
        return warps

    def _step(self, sub, t):
        nxt, chosen = NEVER, None
        for w in self._order(sub):
            r = w.ready
            if r > t:
                if r < nxt:
                    nxt = r
                continue
            until, why = self._blocked_until(w, t)
            if until > t:
                if until < nxt:
                    nxt = until
                w_block = self.block.get(w.wid)
                if w_block is None or until > w_block[1]:
                    self.block[w.wid] = (why, until)
                continue
            chosen = w
            break
        if chosen is None:
            self.next_t[sub] = nxt
            return
        self.last[sub] = chosen.wid
        self._last_yield[sub] = self.ops[chosen.path[chosen.pos]].yield_hint
        self.next_t[sub] = t + 1
        self._issue(chosen, t, self.block.pop(chosen.wid, ("not_selected", 0)))

    def run(self):
        for c in range(min(self.resident, self.total)):
            self._launch(c * self.stagger)
        t = 0
        while True:
            t = min(self.next_t)
            if t >= NEVER:
                break
            for sub in range(self.m.subcores):
                if self.next_t[sub] <= t:
                    self._step(sub, t)
            self.res.cycles = t
        if any(self.warps):
            raise SystemExit("deadlock: warps wait at a barrier that never fills")
        return self.res
