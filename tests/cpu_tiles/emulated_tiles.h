// A TileUnit in AVX-512 that gives AMX's bits, slowly: for tests on processors without it.
#pragma once

#include "kernels/cpu/matrix_tiles.h"

namespace attnd {

// Null where the processor has no AVX-512.
const TileUnit* EmulatedTiles();

}  // namespace attnd
