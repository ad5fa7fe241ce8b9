"""Command line of voltasim."""
import argparse
import json
import sys

from . import cubin, report
from .flow import PathSpec
from .machine import Machine
from .model import Predictor, Role, Setup
from .occupancy import ctas_per_sm
from .sass import parse_listing, parse_short
from .sim import Conflicts


def _int(text):
    return int(text, 0)


def _pairs(items, default=None):
    """'0x120=4' or '0x120/4' -> {0x120: 4}."""
    out = {}
    for item in items or []:
        a, _, n = item.replace("/", "=").partition("=")
        out[_int(a)] = _int(n) if n else default
    return out


def build_parser():
    p = argparse.ArgumentParser(prog="voltasim", description=__doc__)
    p.add_argument("file", help="sm_70 cubin, or a listing with hex columns (.sass/.txt)")
    p.add_argument("--kernel", default="", help="kernel name or unique part of it")
    p.add_argument("--list", action="store_true", help="list the kernels and stop")
    p.add_argument("--branches", action="store_true", help="list branches, barriers and exits and stop")
    p.add_argument("--nvdisasm")
    p.add_argument("--threads", type=_int, help="threads per CTA (default: launch bounds)")
    p.add_argument("--regs", type=_int, help="registers per thread (listings only)")
    p.add_argument("--dynamic-smem", type=_int, default=0)
    p.add_argument("--ctas", type=_int, help="CTAs per SM (default: occupancy)")
    p.add_argument("--loop", type=_int, help="hot loop: address of its header or back edge")
    p.add_argument("--iterations", type=_int, default=0, help="trip count of the hot loop (for --grid)")
    p.add_argument("--trip", action="append", metavar="ADDR=N", help="trip count of a loop (back edge or header)")
    p.add_argument("--taken", action="append", metavar="ADDR[/N]", help="forward branch taken (every N-th visit)")
    p.add_argument("--not-taken", action="append", type=_int, default=[], metavar="ADDR")
    p.add_argument("--exit", action="append", type=_int, default=[], metavar="ADDR",
                   help="branch that leaves its loop after the loop's trips (top-tested loops)")
    p.add_argument("--off", action="append", metavar="ADDR[/N]",
                   help="predicate false (issues, does no work) on every N-th visit")
    p.add_argument("--roles", metavar="FILE", help="JSON list: warps that follow paths of their own (README)")
    p.add_argument("--conflicts", help='JSON: {"by_address": {"0x1b20": 2}, "by_opcode": {"STS": 1.5}}')
    p.add_argument("--bank-conflicts", action="store_true",
                   help="compute the factors from the code, lane by lane (needs numpy)")
    p.add_argument("--block", help="block shape x,y,z for --bank-conflicts (default: threads,1,1)")
    p.add_argument("--params", help='JSON for --bank-conflicts: {"0x160": value} of constant bank 0')
    p.add_argument("--hbm-fraction", type=float, default=0.0, help="share of global loads that miss L2")
    p.add_argument("--scheduler", choices=("gto", "lrr"), default="gto")
    p.add_argument("--stagger", type=_int, default=37, help="cycles between the starts of resident CTAs")
    p.add_argument("--set", action="append", metavar="NAME=VALUE", help="override a machine parameter")
    p.add_argument("--clock-mhz", type=float, default=1380.0)
    p.add_argument("--useful-flops-per-iteration", type=float, default=0.0, help="per CTA")
    p.add_argument("--attention", help="d=64,q_tile=64,kv_tile=64[,pass=bwd]")
    p.add_argument("--grid", type=_int, help="CTAs of the whole launch")
    p.add_argument("--work", help="JSON list: iterations of each CTA in launch order (instead of --grid)")
    p.add_argument("--annotate", action="store_true", help="append the listing with wait cycles")
    p.add_argument("--json", action="store_true")
    return p


def load(args):
    """(listing, kernel record)."""
    with open(args.file, "rb") as f:
        is_elf = f.read(4) == b"\x7fELF"
    if is_elf:
        found = cubin.kernels(args.file)
        if args.list:
            for k in sorted(found.values(), key=lambda k: k.name):
                print(f"{k.regs:4d} regs {k.smem_static:6d} smem {k.size:7d} bytes  {k.name}")
            sys.exit(0)
        kernel = cubin.pick_kernel(found, args.kernel)
        return cubin.disassemble(args.file, kernel, args.nvdisasm), kernel
    text = open(args.file).read()
    listing = parse_listing(text)
    if not listing.instrs:
        listing = parse_short(text)
    if not listing.instrs:
        raise SystemExit("no instructions found in the listing")
    return listing, cubin.Kernel(args.file, 0, args.regs or 0)


def load_roles(file, base):
    """Roles from JSON; `warps` is a half-open range. Trips and exits add to the command line's."""
    def by_address(table):
        return {_int(a): n for a, n in (table or {}).items()}
    roles = []
    for r in json.load(open(file)) if file else []:
        spec = PathSpec({**base.trips, **by_address(r.get("trip"))}, by_address(r.get("taken")),
                        base.exits | {_int(a) for a in r.get("exit", [])},
                        {_int(a) for a in r.get("not_taken", [])}, by_address(r.get("off")))
        roles.append(Role(range(*r["warps"]), spec, _int(r["loop"]) if "loop" in r else None))
    return roles


def make_setup(args, listing, kernel):
    threads = args.threads or kernel.threads
    if not threads:
        raise SystemExit("the cubin has no launch bounds: give --threads")
    smem = kernel.smem_static + args.dynamic_smem
    ctas, limit = ctas_per_sm(args.regs or kernel.regs, smem, threads)
    if args.ctas:
        ctas, limit = args.ctas, "given"
    if not ctas:
        raise SystemExit(f"the kernel does not fit on an SM: {limit}")
    table = json.load(open(args.conflicts)) if args.conflicts else None
    spec = PathSpec(_pairs(args.trip), _pairs(args.taken, 1), set(args.exit), set(args.not_taken),
                    _pairs(args.off, 1))
    setup = Setup(listing, -(-threads // 32), ctas, Machine.from_overrides(args.set), spec, args.loop,
                  Conflicts(table), args.hbm_fraction, args.scheduler, args.stagger,
                  load_roles(args.roles, spec))
    return setup, {"ctas": ctas, "limit": limit, "warps": ctas * -(-threads // 32)}, threads, smem


def bank_conflicts(args, setup, threads):
    """Replace the setup's factors by computed ones; --conflicts entries win."""
    from . import isa, lanes
    params = {int(k, 16): v for k, v in json.load(open(args.params)).items()} if args.params else None
    block = tuple(int(x) for x in args.block.split(",")) if args.block else None
    factors, unknown = {}, set()
    for path in {id(p): p for p, _ in Predictor(setup).paths(3)}.values():
        found, unresolved = lanes.conflicts(setup.listing, path, threads, isa.access_bytes, params, block)
        factors.update({a: max(f, factors.get(a, 0)) for a, f in found.items()})
        unknown |= set(unresolved)
    unknown = sorted(unknown - set(factors))
    setup.conflicts.addr = {**factors, **setup.conflicts.addr}
    return {"factors": {f"{a:#x}": round(f, 2) for a, f in sorted(factors.items()) if f > 1.01},
            "conflict_free": sum(f <= 1.01 for f in factors.values()),
            "unknown": [f"{a:#x}" for a in unknown]}


def run(args):
    listing, kernel = load(args)
    setup, occ, threads, smem = make_setup(args, listing, kernel)
    banks = bank_conflicts(args, setup, threads) if args.bank_conflicts else None
    pred = Predictor(setup)
    useful = args.useful_flops_per_iteration
    if args.attention:
        useful = report.attention_flops(args.attention)
    at = listing.instrs
    info = {"kernel": {"name": kernel.name, "regs": kernel.regs, "threads": threads, "smem": smem,
                       "frame": kernel.frame, "instructions": len(at)},
            "occupancy": occ, "static_mix": dict(report.instruction_mix(listing).most_common(24)),
            "loops": [{"header": f"{at[lp.header].addr:#x}", "last": f"{at[lp.last].addr:#x}",
                       "instructions": lp.last - lp.header + 1, "hmma": lp.hmma, "hot": lp is pred.hot}
                      for lp in pred.loops],
            "unknown": {k: [f"{a:#x}" for a in v] for k, v in pred.unknown.items()}}
    if banks:
        info["bank_conflicts"] = banks
    if pred.hot:
        info["steady"] = report.steady_report(pred, setup, useful, args.clock_mhz)
    else:
        t = pred.cta_time(1, setup.ctas)
        info["straight_line_cycles"] = t
    work = json.load(open(args.work)) if args.work else [args.iterations or 1] * (args.grid or 0)
    if work:
        info["launch"] = report.launch_report(pred, setup, work, useful, args.clock_mhz)
    info["unresolved"] = [f"{a:#x}" for a in sorted(pred.unresolved)]
    return info, listing


def list_branches(listing):
    """Control flow in address order, with the HMMA count in between."""
    targets, hmma = {i.target for i in listing.instrs}, 0
    for ins in listing.instrs:
        hmma += ins.stem == "HMMA"
        if ins.stem in ("BRA", "EXIT", "BAR", "CALL", "RET", "JMP") or ins.addr in targets:
            if hmma:
                print(f"        {hmma} HMMA")
            hmma = 0
            where = f" -> {ins.target:#x}" if ins.target >= 0 else ""
            print(f"{'*' if ins.addr in targets else ' '} {ins.addr:#07x} {ins.text[:60]}{where}")


def main(argv=None):
    args = build_parser().parse_args(argv)
    if args.branches:
        list_branches(load(args)[0])
        return
    info, listing = run(args)
    per = info.get("steady", {}).pop("_per_instr", {})
    if args.json:
        print(json.dumps(info, indent=1))
    else:
        print(report.text_report(info))
        if "straight_line_cycles" in info:
            print(f"no loop: one CTA life time {info['straight_line_cycles']} cycles")
    if args.annotate:
        print(report.annotate(listing, per))
