"""The interpreter's state: global memory (what was written, zero elsewhere), what was moved, a warp's registers."""
import numpy as np

U32 = np.uint32


class Memory:
    """Global memory: pages of bytes, created when written."""

    def __init__(self):
        self.pages = {}

    def write(self, address, data):
        for k, byte in enumerate(bytes(data)):
            page = self.pages.setdefault((address + k) >> 12, bytearray(4096))
            page[(address + k) & 4095] = byte

    def word(self, address):
        page = self.pages.get(address >> 12)
        if page is None:
            return 0
        at = address & 4095
        return int.from_bytes(page[at:at + 4], "little")


class Traffic:
    """Counts what the global accesses of a block move, in sectors of 32 bytes."""

    def __init__(self):
        self.counts = {}                            # address: [accesses; sectors: all, HBM's, those that were read before]
        self.read, self.written = set(), set()      # sectors

    def add(self, address, sectors, writes):
        """One access of an instruction. Nothing that the block has written is read from HBM."""
        known = self.written if writes else self.written | self.read
        again = 0 if writes else len(sectors & self.read)
        so_far = self.counts.get(address, (0, 0, 0, 0))
        self.counts[address] = [n + more for n, more in zip(so_far, (1, len(sectors), len(sectors - known), again))]
        (self.written if writes else self.read).update(sectors)

    def averages(self, l1_bytes):
        """{address: (bytes of the L1, of the L2, of these HBM's)} of one access.

        What the block has read before is in the L1, if all that it reads fits there.
        """
        fits = 32 * len(self.read) <= l1_bytes
        return {address: (32 * again * fits / n, 32 * (sectors - again * fits) / n, 32 * of_hbm / n)
                for address, (n, sectors, of_hbm, again) in self.counts.items()}

    def hbm_bytes(self):
        """Bytes that the block brings from memory and leaves there, each once."""
        return 32 * sum(of_hbm for _, _, of_hbm, _ in self.counts.values())


class Warp:
    def __init__(self, number):
        self.number = number
        self.r = np.zeros((256, 32), dtype=U32)
        self.p = np.zeros((8, 32), dtype=bool)
        self.p[7] = True
        self.pc = np.zeros(32, dtype=np.int64)
        self.alive = np.ones(32, dtype=bool)
        self.path = []
        self.barrier = None
        self.local = {}
        self.stack = [[] for _ in range(32)]
