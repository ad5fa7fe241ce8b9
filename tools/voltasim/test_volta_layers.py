"""Launches of layers, without machine code: python -m unittest test_volta_layers."""
import unittest

import volta_layers


class Launches(unittest.TestCase):
    def test_descriptors_are_as_long_as_the_kernels_read_them(self):
        for launch, size in ((volta_layers.numbers(volta_layers.DROP, 64, 768), 128), (volta_layers.norm(64, 768, 1), 184),
                             (volta_layers.norm_sums(64, 768, (), 3), 200),
                             (volta_layers.sums(64, 768), 112), (volta_layers.adamw(4096), 16),
                             (volta_layers.squares(4096, False), 32)):
            self.assertEqual(len(launch[1]), size, launch[0])
        self.assertEqual(len(volta_layers.step(volta_layers.SUM, 1, 2, 1)), 80)
        self.assertEqual(len(volta_layers.adamw(4096)[2]), 128)

    def test_blocks_are_those_that_the_engine_launches(self):
        self.assertEqual(volta_layers.numbers(volta_layers.CURVE, 16384, 3072)[3], 6144)
        self.assertEqual(volta_layers.norm(16384, 768, 0)[3], 2048)
        self.assertEqual(volta_layers.sums(16384, 768, 3072)[3], 16 * (24 + 96))

    def test_a_layer_has_as_many_launches_as_the_engine_counts(self):
        def launches(direction, fused):
            return sum(times for times, _ in volta_layers.passes(64, 768, direction, fused).values())

        self.assertEqual([launches(way, fused) for way in ("forward", "backward") for fused in (False, True)], [7, 2, 10, 4])

    def test_eager_is_bound_by_scores_where_rows_are_long(self):
        short, long = (volta_layers.eager_microseconds(64, n) for n in (512, 16384))
        self.assertAlmostEqual(short / 1e3, 24.8, delta=0.1)
        self.assertAlmostEqual(long / 1e3, 222.8, delta=0.5)


class Share(unittest.TestCase):
    def test_many_blocks_of_an_sm_are_extrapolated(self):
        class Linear:
            def simulate(self, paths, ctas, blocks):
                self.most = max(getattr(self, "most", 0), blocks)
                return type("Result", (), {"cycles": 100 + 7 * blocks})

        linear = Linear()
        self.assertEqual([volta_layers.sm_cycles(linear, [], 2, n) for n in (5, 12, 1000)], [135, 184, 7100])
        self.assertEqual(linear.most, 12)


if __name__ == "__main__":
    unittest.main()
