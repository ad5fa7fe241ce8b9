#include "tests/emulator/product_sm90.h"

#include <vector>

#include "tests/emulator/block.h"
#include "tests/emulator/mma_sm70.h"

namespace attnd::emulator {
namespace {

constexpr int kDepth = 16, kRows = 16, kChunk = 8;  // numbers in 16 bytes

struct Matrix {
  uint32_t start, leading, stride;
  explicit Matrix(uint64_t descriptor)
      : start(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4) {}
};

// Eight numbers of a row; `column` is a multiple of eight.
void LoadChunk(const WarpProduct& product, const Matrix& matrix, int row, int column, double* to) {
  const uint32_t panel = static_cast<uint32_t>(column / 64) * matrix.leading;
  const uint32_t offset = matrix.start + panel + static_cast<uint32_t>(row / 8) * matrix.stride +
                          static_cast<uint32_t>(row % 8 * 128 + column % 64 * 2);
  const std::byte* from = CurrentShared() + Swizzled(offset);
  CheckShared(from, kChunk * 2, Access::kLoad, product.where);
  const auto* halves = reinterpret_cast<const uint16_t*>(from);
  for (int n = 0; n < kChunk; ++n) to[n] = Widen(product.kind, halves[n]);
}

void LoadA(const WarpProduct& product, double (&a)[kRows][kDepth]) {
  const Matrix matrix(product.matrix_a);
  if (product.across_a) {
    double column[kRows];
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < kRows; n += kChunk) {
        LoadChunk(product, matrix, k, product.first_row + n, column + n);
      }
      for (int row = 0; row < kRows; ++row) a[row][k] = column[row];
    }
    return;
  }
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kDepth; k += kChunk) {
      if (!product.in_registers) LoadChunk(product, matrix, product.first_row + row, k, a[row] + k);
    }
  }
  if (!product.in_registers) return;
  for (int lane = 0; lane < 32; ++lane) {
    for (int n = 0; n < 8; ++n) {  // n & 1: of a word, n & 2: rows 8 to 15, n & 4: columns 8 to 15
      const uint32_t word = product.a[lane][n >> 1];
      a[lane / 4 + (n & 2) * 4][lane % 4 * 2 + (n & 1) + (n & 4) * 2] =
          Widen(product.kind, word >> 16 * (n & 1) & 0xffffu);
    }
  }
}

// b[k][column]
void LoadB(const WarpProduct& product, std::vector<std::vector<double>>& b) {
  const Matrix matrix(product.matrix_b);
  const int columns = product.groups * 8;
  if (product.in_registers || product.across_b) {
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < columns; n += kChunk) LoadChunk(product, matrix, k, n, b[k].data() + n);
    }
    return;
  }
  double row[kDepth];
  for (int n = 0; n < columns; ++n) {
    for (int k = 0; k < kDepth; k += kChunk) LoadChunk(product, matrix, n, k, row + k);
    for (int k = 0; k < kDepth; ++k) b[k][n] = row[k];
  }
}

}  // namespace

void Multiply(const WarpProduct& product) {
  const int columns = product.groups * 8;
  double a[kRows][kDepth];
  std::vector<std::vector<double>> b(kDepth, std::vector<double>(columns));
  LoadA(product, a);
  LoadB(product, b);
  std::vector<double> sum(columns);
  for (int row = 0; row < kRows; ++row) {
    std::fill(sum.begin(), sum.end(), 0);
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < columns; ++n) sum[n] += a[row][k] * b[k][n];
    }
    for (int n = 0; n < columns; ++n) {
      float& c = product.c[row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 * 2 + n % 2];
      c = TruncateToFloat(sum[n] + (product.adds ? c : 0));
    }
  }
}

}  // namespace attnd::emulator
