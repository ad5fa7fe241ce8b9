// The vector targets the CPU engine is compiled for; to be included before foreach_target.h. SSSE3
// adds nothing to the SSE2 baseline here. Scalable vectors (SVE, RISC-V) cannot stand in arrays, as
// the register tile of gemm-inl.h needs; those processors take NEON or the scalar target.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
