// MatrixTiles: the processor's unit for products of tiles (tile_product.h), AMX, if it has one.
//
// Float32 tensors do not come here: as three terms and six products they made whole calls slower.
#pragma once

#include "kernels/cpu/tile_product.h"

namespace attnd {

// Computes products. Between configure and release a thread's tile registers hold data that each
// context switch must save.
struct TileUnit {
  const char* name;
  void (*configure)();
  void (*multiply)(const TileProduct& product);
  void (*release)();
};

// The processor's unit, or null; the first call asks the kernel for the permission to use it.
// A test may choose another one, or none.
const TileUnit* MatrixTiles();
void ChooseMatrixTiles(const TileUnit* unit);

// TileSession: configures the unit for the thread and this scope.
class TileSession {
 public:
  explicit TileSession(const TileUnit& unit) : unit_(unit) { unit_.configure(); }
  ~TileSession() { unit_.release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  const TileUnit& unit_;
};

}  // namespace attnd
