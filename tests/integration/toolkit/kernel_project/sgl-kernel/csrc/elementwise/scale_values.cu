#include "sgl_kernel_ops.h"

namespace {

__global__ void scale(float *values, int64_t count, float factor)
{
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) values[i] *= factor;
}

}  // namespace

int sgl_kernel_small::scale_values(float *values, int64_t count, float factor)
{
    count_launch();
    if (count == 0) return cudaSuccess;
    scale<<<static_cast<unsigned>((count + 255) / 256), 256>>>(values, count, factor);
    return cudaGetLastError();
}
