// Dependent-chain kernels for the calibration of voltasim; compile for sm_70, e.g.
//   nvcc -cubin -arch=sm_70 micro.cu        (CUDA 12.x; NVRTC works too)
// Each loop body holds 32 operations (64 for ffma) of one warp.
#include <cuda_fp16.h>
#define MMA32(c, a0, a1, b0, b1)                                                            \
  asm volatile(                                                                             \
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "                                    \
      "{%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},{%0,%1,%2,%3,%4,%5,%6,%7};"              \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
        "+f"(c[7])                                                                          \
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1))
#define MMA16(c, a0, a1, b0, b1)                         \
  asm volatile(                                          \
      "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16 " \
      "{%0,%1,%2,%3},{%4,%5},{%6,%7},{%0,%1,%2,%3};"     \
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])   \
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1))
extern "C" __global__ __launch_bounds__(32) void chain32(float* o, const unsigned* a, int n) {
  float c[8] = {};
  unsigned a0 = a[threadIdx.x], a1 = a[threadIdx.x + 32], b0 = a[threadIdx.x + 64],
           b1 = a[threadIdx.x + 96];
#pragma unroll 1
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 32; i++) MMA32(c, a0, a1, b0, b1);
  }
  for (int i = 0; i < 8; i++) o[threadIdx.x * 8 + i] = c[i];
}
extern "C" __global__ __launch_bounds__(32) void chain32x4(float* o, const unsigned* a, int n) {
  float c[4][8] = {};
  unsigned a0 = a[threadIdx.x], a1 = a[threadIdx.x + 32], b0 = a[threadIdx.x + 64],
           b1 = a[threadIdx.x + 96];
#pragma unroll 1
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 32; i++) MMA32(c[i & 3], a0, a1, b0, b1);
  }
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 8; i++) o[threadIdx.x * 32 + j * 8 + i] = c[j][i];
}
extern "C" __global__ __launch_bounds__(32) void chain16(unsigned* o, const unsigned* a, int n) {
  unsigned c[4] = {};
  unsigned a0 = a[threadIdx.x], a1 = a[threadIdx.x + 32], b0 = a[threadIdx.x + 64],
           b1 = a[threadIdx.x + 96];
#pragma unroll 1
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 32; i++) MMA16(c, a0, a1, b0, b1);
  }
  for (int i = 0; i < 4; i++) o[threadIdx.x * 4 + i] = c[i];
}
extern "C" __global__ __launch_bounds__(32) void ldschain(unsigned* o, const unsigned* a, int n) {
  __shared__ unsigned s[64];
  s[threadIdx.x] = a[threadIdx.x];
  s[threadIdx.x + 32] = a[threadIdx.x + 32];
  __syncthreads();
  unsigned p = (unsigned)__cvta_generic_to_shared(s) + threadIdx.x * 4;
#pragma unroll 1
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("ld.shared.u32 %0,[%0];" : "+r"(p));
  }
  o[threadIdx.x] = p;
}
extern "C" __global__ __launch_bounds__(32) void ldgchain(unsigned long long* o,
                                                          const unsigned long long* a, int n) {
  unsigned long long p = (unsigned long long)(a + threadIdx.x);
#pragma unroll 1
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("ld.global.cg.u64 %0,[%0];" : "+l"(p));
  }
  o[threadIdx.x] = p;
}
extern "C" __global__ __launch_bounds__(32) void roundtrip(unsigned* o, const unsigned* a, int n) {
  __shared__ unsigned s[64];
  volatile unsigned* v = s;
  unsigned x = a[threadIdx.x];
#pragma unroll 1
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
      v[threadIdx.x] = x;
      __syncwarp();
      x = v[threadIdx.x ^ 1];
      __syncwarp();
    }
  }
  o[threadIdx.x] = x;
}
extern "C" __global__ __launch_bounds__(32) void ffma(float* o, float b, int n) {
  float x = threadIdx.x;
#pragma unroll 1
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("fma.rn.f32 %0,%0,%1,%1;" : "+f"(x) : "f"(b));
  }
  o[threadIdx.x] = x;
}
