// What the operators are made of. Without torch's headers, so that the kernels compile in seconds.
#pragma once

#include <cstdint>

namespace sgl_kernel_small {

// D[16x8] = A[16x64] B[8x64]^T: E2M1 values, eight in a word, and a UE4M3 scale per 16 of them, four in a word.
// Raises nothing; the result is cudaError_t.
int fp4_tile_mm(float *d, const uint32_t *a, const uint32_t *b, const uint32_t *scales_a, const uint32_t *scales_b);

// values[i] *= factor
int scale_values(float *values, int64_t count, float factor);

// How often the two above were called.
int64_t launches();
void count_launch();

}  // namespace sgl_kernel_small
