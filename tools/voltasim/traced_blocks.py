"""For the reports on a V100: reads machine code, traces blocks of it, and predicts launches from the traces."""
import tempfile

from voltasim import cubin
from voltasim.execute import Block
from voltasim.flow import PathSpec
from voltasim.machine import Machine
from voltasim.model import Setup
from voltasim.occupancy import ctas_per_sm
from voltasim.sim import Conflicts


def read_kernel(image, name, nvdisasm):
    """(listing, kernel) of the entry `name` of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(image)
        f.flush()
        kernel = cubin.pick_kernel(cubin.kernels(f.name), name)
        return cubin.disassemble(f.name, kernel, nvdisasm), kernel


def run_block(listing, warps, shared_bytes, constants, memory, block_index=0, l1_below=0):
    """A Block that has run."""
    block = Block(listing, constants, memory, range(warps), shared_bytes, block_index=block_index, l1_below=l1_below)
    block.run()
    if block.unknown:
        raise SystemExit(f"opcodes that execute.py does not know: {sorted(block.unknown)}")
    return block


def trace(listing, warps, shared_bytes, launches, block_index=0):
    """({key: {warp: path}}, {address: bank-conflict factor}): one block of each of {key: (constants, memory)}."""
    traces, factors = {}, {}
    for key, (constants, memory) in launches.items():
        block = run_block(listing, warps, shared_bytes, constants, memory, block_index)
        traces[key] = {w.number: w.path for w in block.warps}
        factors.update(block.conflict_factors())
    return traces, factors


def setup_of(listing, kernel, shared_bytes, factors, scheduler="gto", stagger=37):
    """The Setup of blocks of a kernel with so much shared memory, as many on an SM as fit."""
    setup = Setup(listing, kernel.threads // 32, ctas_per_sm(kernel.regs, shared_bytes, kernel.threads)[0], Machine(),
                  PathSpec(), None, Conflicts(), 0.0, scheduler, stagger, [])
    setup.conflicts.addr = dict(factors)
    return setup
