"""Steady state, whole-launch time and lower bounds of a kernel."""
import heapq
from collections import Counter
from dataclasses import dataclass, field

from . import isa
from .flow import PathSpec, Walker, find_loops, hot_loop
from .machine import Machine
from .sim import Conflicts, Sim, prepare


@dataclass
class Role:
    """Warps of a CTA that follow a path of their own (warp specialisation)."""
    warps: range
    spec: PathSpec
    loop_addr: int = None


@dataclass
class Setup:
    """Everything that defines one prediction."""
    listing: object
    warps: int
    ctas: int
    machine: Machine = field(default_factory=Machine)
    spec: PathSpec = field(default_factory=PathSpec)
    loop_addr: int = None
    conflicts: Conflicts = field(default_factory=Conflicts)
    hbm_fraction: float = 0.0
    scheduler: str = "gto"
    stagger: int = 37
    roles: list = field(default_factory=list)       # of Role; other warps follow `spec`
    traffic: dict = None                            # of global accesses, as sim.prepare has it


def demand(ops, indices, m):
    """Cycles one warp asks of each resource for a list of instruction indices."""
    d = Counter()
    for i in indices:
        op = ops[i]
        d["issue"] += 1
        d[isa.PIPES[op.pipe]] += op.interval
        d["smem_data"] += op.data
        d["l2"] += op.l2
        d["hbm"] += op.hbm
    return d


def alone(ops, indices):
    """Cycles of one warp with every resource free: stalls and scoreboards only."""
    sb, sbh, t, last = [0.0] * 6, [0.0] * 6, 0.0, None
    for i in indices:
        op = ops[i]
        src = sbh if op.is_hmma else sb
        for k in op.waits:
            t = max(t, src[k])
        done = t + op.latency + op.data + op.l2 + (6 if op.pipe == isa.PIPES.index(isa.MIO) else 0)
        if op.wsb < 7:
            sb[op.wsb] = max(sb[op.wsb], done)
            sbh[op.wsb] = max(sbh[op.wsb], t + op.chain if op.is_hmma else done)
        t += op.stall
        last = i
    return t if last is not None else 0.0


def lower_bounds(ops, bodies, setup):
    """Cycles per iteration of all resident CTAs that no schedule can beat, per resource.

    `bodies` holds one loop body per warp of a CTA; warps go to the sub-cores in turn.
    """
    m = setup.machine
    cost = {id(b): (demand(ops, b, m), alone(ops, b)) for b in bodies}
    sub = [Counter() for _ in range(m.subcores)]
    for w in range(setup.warps * setup.ctas):
        sub[w % m.subcores].update(cost[id(bodies[w % setup.warps])][0])
    out = {k: max(d[k] for d in sub) for k in ("issue",) + isa.PIPES}
    out["smem_data"] = sum(d["smem_data"] for d in sub)
    out["l2"] = sum(d["l2"] for d in sub)
    out["hbm"] = sum(d["hbm"] for d in sub)
    out["one_warp_latency"] = max(latency for _, latency in cost.values())
    return out


def split_path(path, header):
    """(prologue, list of iterations, tail incl. the last iteration)."""
    at = [k for k, i in enumerate(path) if i == header]
    if not at:
        return path, [], []
    iters = [path[a:b] for a, b in zip(at, at[1:])]
    return path[:at[0]], iters, path[at[-1]:]


def _bodies(paths, k):
    """The k-th loop iteration of each warp of a CTA; warps of one role share one list."""
    cache = {}
    for path, header in paths:
        if id(path) not in cache:
            _, iters, _ = split_path(path, header)
            cache[id(path)] = iters[k] if len(iters) > k else iters[-1]
    return [cache[id(path)] for path, _ in paths]


def _progress(marks, warp, last, t):
    """Iterations (with fraction) a warp has started by time t."""
    k = 0
    while k < last and marks[(warp, k + 1)] <= t:
        k += 1
    if k == last:
        return float(k)
    lo, hi = marks[(warp, k)], marks[(warp, k + 1)]
    return k + max(0, t - lo) / (hi - lo)


class Predictor:
    """Simulates a Setup; results are plain numbers and dicts."""

    def __init__(self, setup):
        self.s = setup
        self.loops = find_loops(setup.listing)
        self.hot = hot_loop(self.loops, setup.listing, setup.loop_addr)
        self.ops, self.unknown = prepare(setup.listing, setup.machine, setup.conflicts,
                                         setup.hbm_fraction, setup.traffic)
        self.unresolved = set()

    def _walk(self, spec, hot, iterations):
        w = Walker(self.s.listing, self.loops, spec, hot, iterations)
        p = w.path()
        self.unresolved |= w.unresolved
        return p

    def path(self, iterations):
        """The path of the warps without a role."""
        return self._walk(self.s.spec, self.hot, iterations)

    def paths(self, iterations):
        """(path, loop header) of each warp of a CTA; warps of one role share one path object."""
        out = [(self.path(iterations), self.hot.header if self.hot else -1)] * self.s.warps
        for role in self.s.roles:
            hot = self.hot
            if role.loop_addr is not None:
                hot = hot_loop(self.loops, self.s.listing, role.loop_addr)
            own = (self._walk(role.spec, hot, iterations), hot.header if hot else -1)
            for w in role.warps:
                out[w] = own
        return out

    def simulate(self, paths, ctas, total=None, window=None):
        s = self.s
        return Sim(self.ops, paths, s.machine, s.warps, ctas, total, -1, s.scheduler, s.stagger, window,
                   len(s.listing.instrs)).run()

    def steady(self, ctas=None, warm=3, measure=12):
        """Cycles per hot-loop iteration while all resident CTAs are inside the loop.

        Counts the iterations of all warps between the moment the last warp has done
        `warm` iterations and the moment the first warp leaves the loop.
        """
        ctas = ctas or self.s.ctas
        last = warm + measure + 1
        paths = self.paths(last + 1)
        res = self.simulate(paths, ctas, window=(warm, last - 1))
        warps = range(ctas * self.s.warps)
        if (0, last) not in res.marks:
            raise SystemExit("the hot loop does not run its iterations on this path: check --taken, "
                             "--exit and --loop (branches are listed with --branches)")
        t0 = max(res.marks[(w, warm)] for w in warps)
        t1 = min(res.marks[(w, last)] for w in warps)
        if t1 <= t0 and measure < 100:
            return self.steady(ctas, warm, measure * 2)
        done = sum(_progress(res.marks, w, last, t1) - _progress(res.marks, w, last, t0)
                   for w in warps)
        return {"cycles": (t1 - t0) * len(warps) / done, "res": res, "bodies": _bodies(paths, warm)}

    def cta_time(self, iterations, ctas):
        """Life time in cycles of a CTA when `ctas` share the SM; long loops are extrapolated."""
        short = min(iterations, 8)
        res = self.simulate(self.paths(short), ctas)
        t = max(end for _, end in res.cta_end)
        if iterations > short:
            longer = self.simulate(self.paths(short + 4), ctas)
            t2 = max(end for _, end in longer.cta_end)
            t += (iterations - short) * (t2 - t) / 4
        return t

    def rates(self, base_iterations=8):
        """Per number of resident CTAs: (cycles per iteration of each, cycles outside the loop)."""
        out = {}
        for k in range(1, self.s.ctas + 1):
            c = self.steady(k)["cycles"]
            t = self.cta_time(base_iterations, k)
            out[k] = (c, max(0.0, t - base_iterations * c))
        return out

    def launch(self, work, rates=None):
        """Cycles of a launch; `work` = loop iterations of each CTA in launch order.

        Each SM runs up to `ctas` CTAs; a CTA advances at the simulated speed for the
        number of CTAs on its SM at that moment, and a free slot takes the next CTA.
        """
        rates, m = rates or self.rates(), self.s.machine
        queue = list(reversed(work))
        sms = [[] for _ in range(m.num_sm)]             # remaining work, as a share of a CTA's life
        clock = [0.0] * m.num_sm
        heap = []

        def speed(k, n):
            c, rest = rates[k]
            return 1.0 / (n * c + rest)

        def push(i):
            sms[i].sort()
            k = len(sms[i])
            dt = min(left / speed(k, n) for left, n in sms[i])
            heapq.heappush(heap, (clock[i] + dt, i))

        for _ in range(self.s.ctas):
            for i in range(m.num_sm):
                if queue:
                    sms[i].append((1.0, queue.pop()))
        for i in range(m.num_sm):
            if sms[i]:
                push(i)
        end = 0.0
        while heap:
            t, i = heapq.heappop(heap)
            k, dt = len(sms[i]), t - clock[i]
            sms[i] = [(left - dt * speed(k, n), n) for left, n in sms[i]]
            sms[i] = [(left, n) for left, n in sms[i] if left > 1e-9]
            while len(sms[i]) < self.s.ctas and queue:
                sms[i].append((1.0 + m.cta_launch * speed(k, 1 if not queue else queue[-1]), queue.pop()))
            clock[i] = end = t
            if sms[i]:
                push(i)
        return {"cycles": end, "rates": rates}
