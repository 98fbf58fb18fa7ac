// One block-scaled FP4 matrix product of SM120, with the operands where the PTX ISA says that mma.m16n8k64 has them.
#include "sgl_kernel_ops.h"

#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL) || \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ == 1200)
#define HAS_FP4_MMA 1
#endif

namespace {

__global__ void tile(
    float *d, const uint32_t *a, const uint32_t *b, const uint32_t *scales_a, const uint32_t *scales_b)
{
#ifdef HAS_FP4_MMA
    const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
    float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    asm volatile(
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};\n"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a[row * 8 + part]), "r"(a[(row + 8) * 8 + part]), "r"(a[row * 8 + part + 4]),
          "r"(a[(row + 8) * 8 + part + 4]), "r"(b[row * 8 + part]), "r"(b[row * 8 + part + 4]),
          "r"(scales_a[row + 8 * (part % 2)]), "r"(scales_b[row]));
    float *out = d + row * 8 + part * 2;
    out[0] = d0;
    out[1] = d1;
    out[64] = d2;
    out[65] = d3;
#else
    __trap();
#endif
}

}  // namespace

int sgl_kernel_small::fp4_tile_mm(
    float *d, const uint32_t *a, const uint32_t *b, const uint32_t *scales_a, const uint32_t *scales_b)
{
    count_launch();
    tile<<<1, 32>>>(d, a, b, scales_a, scales_b);
    return cudaGetLastError();
}
