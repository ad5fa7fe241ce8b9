"""The interpreter: paths, divergence, bank conflicts, barriers."""
import unittest

from voltasim.execute import Block, Memory
from voltasim.sass import parse_short


def listing(*lines):
    return parse_short("\n".join(f"{16 * n:05x} B------ R- W- - S01  {text}" for n, text in enumerate(lines)))


def run(code, warps=(0,), constants=None, memory=None):
    block = Block(code, constants or {}, memory or Memory(), warps, 4096)
    return block, block.run()


class Execute(unittest.TestCase):
    def test_a_loop_runs_as_often_as_its_counter_says(self):
        code = listing("MOV R0, RZ", "IADD3 R0, R0, 0x1, RZ", "ISETP.LT.AND P0, PT, R0, 0x5, PT",
                       "@P0 BRA 0x10", "EXIT")
        _, paths = run(code)
        self.assertEqual(paths[0], [0] + [1, 2, 3] * 5 + [4])

    def test_lanes_that_diverge_meet_again(self):
        code = listing("S2R R0, SR_TID.X", "ISETP.GE.AND P0, PT, R0, 0x10, PT", "@P0 BRA 0x40",
                       "MOV R1, 0x7", "IADD3 R2, R1, 0x1, RZ", "EXIT")
        block, paths = run(code)
        self.assertEqual(paths[0], [0, 1, 2, 3, 4, 5])
        self.assertEqual(list(block.warps[0].r[2]), [8] * 16 + [1] * 16)

    def test_an_instruction_predicated_off_for_all_lanes_is_marked(self):
        code = listing("ISETP.NE.AND P0, PT, RZ, RZ, PT", "@P0 MOV R1, 0x7", "EXIT")
        _, paths = run(code)
        self.assertEqual(paths[0], [0, 1 + 3, 2])

    def test_global_memory_is_read_and_branched_on(self):
        memory = Memory()
        memory.write(0x1000, (3).to_bytes(4, "little"))
        code = listing("MOV R2, c[0x0][0x160]", "MOV R3, c[0x0][0x164]", "LDG.E.SYS R0, [R2]",
                       "ISETP.EQ.AND P0, PT, R0, 0x3, PT", "@P0 BRA 0x60", "MOV R1, 0x1", "EXIT")
        _, paths = run(code, constants={0x160: 0x1000}, memory=memory)
        self.assertEqual(paths[0], [0, 1, 2, 3, 4, 6])

    def test_float_arithmetic_decides_branches(self):
        code = listing("MOV R0, 0x40000000", "MUFU.EX2 R1, R0", "FSETP.GT.AND P0, PT, R1, 3.5, PT",
                       "VOTE.ANY P1, P0", "@P1 BRA 0x60", "MOV R2, 0x1", "EXIT")
        _, paths = run(code)
        self.assertEqual(paths[0], [0, 1, 2, 3, 4, 6])

    def test_pairs_of_halves_are_multiplied(self):
        block, _ = run(listing("MOV R0, 0x40003c00", "MOV R1, 0xc0004200", "HMUL2 R2, R0, R1", "EXIT"))
        self.assertEqual(hex(block.warps[0].r[2][0]), "0xc4004200")      # 2 · −2 and 1 · 3

    def test_bits_are_counted(self):
        block, _ = run(listing("S2R R0, SR_TID.X", "POPC R1, R0", "EXIT"))
        self.assertEqual(list(block.warps[0].r[1]), [bin(n).count("1") for n in range(32)])

    def test_low_bits_are_extended(self):
        block, _ = run(listing("MOV R0, 0xff", "SGXT.U32 R1, R0, 0x5", "SGXT R2, R0, 0x5", "EXIT"))
        self.assertEqual((block.warps[0].r[1][0], block.warps[0].r[2][0]), (31, 0xFFFFFFFF))

    def test_strided_stores_conflict_and_dense_ones_do_not(self):
        code = listing("S2R R0, SR_TID.X", "IMAD.SHL.U32 R1, R0, 0x4, RZ", "IMAD.SHL.U32 R2, R0, 0x8, RZ",
                       "STS [R1], R0", "STS [R2], R0", "LDS.U R3, [R2]", "EXIT")
        block, _ = run(code)
        self.assertEqual(block.conflict_factors(), {0x30: 1, 0x40: 2, 0x50: 2})
        self.assertEqual(list(block.warps[0].r[3]), list(range(32)))

    def test_a_difference_of_64_bits_borrows_even_from_zero(self):
        block, _ = run(listing("IADD3 R0, P1, P2, RZ, 0x5, -R4", "IADD3.X R1, RZ, RZ, ~R5, P1, P2", "EXIT"))
        self.assertEqual((block.warps[0].r[0][0], block.warps[0].r[1][0]), (5, 0))

    def test_a_jump_follows_its_table(self):
        _, paths = run(listing("MOV R0, c[0x2][0x4]", "BRX R0 -0x20 (*\"BRANCH_TARGETS .L_1\"*)", "EXIT", "NOP", "EXIT"),
                       constants={(2, 4): 0x30})
        self.assertEqual(paths[0], [0, 1, 3, 4])

    def test_bytes_are_those_of_sectors_and_of_memory_once(self):
        code = listing("S2R R0, SR_TID.X", "IMAD.SHL.U32 R2, R0, 0x4, RZ", "MOV R3, 0x1", "MOV R5, 0x0", "MOV R4, 0x80",
                       "LDG.E.SYS R6, [R2]", "LDG.E.SYS R6, [R2]", "STG.E.SYS [R2], R6", "STG.E.SYS [R2], R6",
                       "LDG.E.SYS R6, [R4]", "EXIT")
        block = Block(code, {}, Memory(), (0,), 4096, l1_below=1 << 32)
        block.run()
        self.assertEqual(block.traffic.averages(l1_bytes=128), {0x50: (0, 128, 128), 0x60: (128, 0, 0), 0x70: (0, 128, 128),
                                                       0x80: (0, 128, 0), 0x90: (0, 0, 0)})
        self.assertEqual(block.traffic.averages(l1_bytes=127)[0x60], (0, 128, 0))
        self.assertEqual(block.traffic.hbm_bytes(), 256)

    def test_a_named_barrier_lets_two_warps_through_and_records_its_number(self):
        code = listing("MOV R0, 0x3", "BAR.SYNC R0, 0x40", "EXIT")
        _, paths = run(code, warps=(0, 1))
        self.assertEqual(paths[1], [0, 1 + 3 * (2 + 3), 2])

    def test_a_barrier_that_never_fills_is_a_deadlock(self):
        with self.assertRaises(SystemExit):
            run(listing("BAR.SYNC 0x1, 0x40", "EXIT"))


if __name__ == "__main__":
    unittest.main()
