"""The interpreter's state: global memory (what was written, zero elsewhere) and a warp's registers."""
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
