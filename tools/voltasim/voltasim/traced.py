"""A predictor whose warps follow paths that were executed, not described.

Run the kernel (execute.Block) for an even and an odd number of steps; each warp's path is cut at the
header of its step loop, and a middle pair of steps is repeated to the length that is asked for.
"""
from collections import Counter

from .model import Predictor
from .sim import with_barrier

BARRIERS = 16


class TracedPredictor(Predictor):
    """`traces`: {steps: {warp: path}}, one even and one odd number of steps."""

    def __init__(self, setup, traces):
        super().__init__(setup)
        self.n = len(setup.listing.instrs)
        self.ops = self.ops + [None] * (BARRIERS * self.n)
        for paths in traces.values():
            for path in paths.values():
                self._add_barriers(path)
        self.cuts, self.like = [{}, {}], {}
        even, seen = next(s for s in traces if s % 2 == 0), {}
        for warp, path in traces[even].items():
            first = seen.setdefault(tuple(path), warp)
            self.like[warp] = first
            if first == warp:
                for steps, paths in traces.items():
                    self.cuts[steps % 2][warp] = (steps,) + self._cut(paths[warp], steps)

    def _add_barriers(self, path):
        for i in path:
            if i >= 2 * self.n and self.ops[i] is None:
                self.ops[i] = with_barrier(self.ops[i % self.n], i // self.n - 2)

    def _cut(self, path, steps):
        """(header, before the loop, its iterations, the rest) of the outermost loop that meets barriers."""
        instrs, heads, prev = self.s.listing.instrs, Counter(), -1
        for i in path:
            i %= self.n
            if 0 <= i <= prev and instrs[prev].stem == "BRA":
                heads[i] += 1
            prev = i
        for head in sorted(h for h, count in heads.items() if steps - 3 <= count <= steps):
            at = [k for k, i in enumerate(path) if i % self.n == head]
            bodies = [path[a:b] for a, b in zip(at, at[1:])]
            if all(any(instrs[i % self.n].stem == "BAR" for i in body) for body in bodies):
                return head, path[:at[0]], bodies, path[at[-1]:]
        raise SystemExit(f"no step loop found: back edges {heads.most_common(8)}, {steps} steps")

    def bodies_of(self, warp):
        """Two steps from the middle."""
        bodies = self.cuts[0][warp][3]
        mid = len(bodies) // 2 // 2 * 2
        return bodies[mid:mid + 2]

    def _path_of(self, warp, iterations):
        steps, head, before, bodies, after = self.cuts[iterations % 2][warp]
        middle, out = self.bodies_of(warp), list(before)
        for k in range(max(0, len(bodies) - steps + iterations)):
            out += middle[k % 2] if k > 1 else bodies[k]
        return out + list(after), head

    def whole(self, paths):
        """(path, no loop) of each warp of a block, as it was executed."""
        for path in paths.values():
            self._add_barriers(path)
        return [(paths[w], -1) for w in range(self.s.warps)]

    def path(self, iterations):
        return self._path_of(0, iterations)[0]

    def paths(self, iterations):
        made = {w: self._path_of(w, iterations) for w in self.cuts[0]}
        return [made[self.like[w]] for w in range(self.s.warps)]

    def code_lines(self):
        """128-byte lines of code that one step of all roles touches."""
        return len({i % self.n >> 3 for w in self.cuts[0] for body in self.bodies_of(w) for i in body})

    def loop_addresses(self):
        return {self.s.listing.instrs[i % self.n].addr
                for w in self.cuts[0] for body in self.bodies_of(w) for i in body}
