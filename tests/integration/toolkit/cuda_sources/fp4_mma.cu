// One block-scaled FP4 matrix product of SM120: D[16x8] = A[16x64] B[64x8] + C, E2M1 values, a UE4M3 scale per 16.
// The registers' contents do not matter here, only which instruction they become.
#include <cstdint>

__global__ void fp4_mma(float *d, const uint32_t *a, const uint32_t *b, const uint32_t *scales)
{
    float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    asm volatile(
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};\n"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scales[0]), "r"(scales[1]));
    d[0] = d0;
    d[1] = d1;
    d[2] = d2;
    d[3] = d3;
}
