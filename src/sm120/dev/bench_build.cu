// What dev.bench build compiles: sorting and scanning by CUB's templates, as sgl-kernel routes tokens to experts, and
// the block-scaled FP4 product of SM120.
#include <cstdint>

#include <cub/block/block_radix_sort.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cuda_bf16.h>

#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define HAS_FP4_MMA 1
#endif

namespace {

// The largest values of each row first, with where they stood.
template <class Value, int threads, int items>
__global__ void order_rows(Value *values, int32_t *places, int columns)
{
    using Sort = cub::BlockRadixSort<float, threads, items, int32_t>;
    __shared__ typename Sort::TempStorage storage;
    float keys[items];
    int32_t from[items];
    Value *row = values + int64_t{blockIdx.x} * columns;
    for (int i = 0; i < items; i++) {
        from[i] = static_cast<int>(threadIdx.x) * items + i;
        keys[i] = from[i] < columns ? static_cast<float>(row[from[i]]) : -INFINITY;
    }
    Sort(storage).SortDescending(keys, from);
    for (int i = 0; i < items; i++) {
        const int at = static_cast<int>(threadIdx.x) * items + i;
        if (at < columns) {
            row[at] = static_cast<Value>(keys[i]);
            places[int64_t{blockIdx.x} * columns + at] = from[i];
        }
    }
}

__global__ void fp4_tile(float *d, const uint32_t *a, const uint32_t *b, const uint32_t *scales)
{
#ifdef HAS_FP4_MMA
    float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    for (int k = 0; k < 8; k++, a += 128, b += 64)
        asm volatile(
            "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};\n"
            : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scales[0]), "r"(scales[1]));
    d[0] = d0;
    d[1] = d1;
    d[2] = d2;
    d[3] = d3;
#else
    __trap();
#endif
}

}  // namespace

template <class Value>
void order(Value *values, int32_t *places, int rows, int columns, cudaStream_t stream)
{
    if (columns <= 128)
        order_rows<Value, 32, 4><<<rows, 32, 0, stream>>>(values, places, columns);
    else if (columns <= 512)
        order_rows<Value, 128, 4><<<rows, 128, 0, stream>>>(values, places, columns);
    else
        order_rows<Value, 256, 8><<<rows, 256, 0, stream>>>(values, places, columns);
}

template void order(float *, int32_t *, int, int, cudaStream_t);
template void order(__nv_bfloat16 *, int32_t *, int, int, cudaStream_t);

cudaError_t group_by_expert(
    void *storage, size_t &bytes, const int32_t *experts, int32_t *sorted, const int32_t *tokens, int32_t *places,
    int32_t *offsets, int count, cudaStream_t stream)
{
    size_t scan = 0;
    cudaError_t error =
        cub::DeviceRadixSort::SortPairs(storage, bytes, experts, sorted, tokens, places, count, 0, 10, stream);
    if (error == cudaSuccess) error = cub::DeviceScan::ExclusiveSum(nullptr, scan, sorted, offsets, count, stream);
    bytes = bytes > scan ? bytes : scan;
    if (storage == nullptr || error != cudaSuccess) return error;
    return cub::DeviceScan::ExclusiveSum(storage, bytes, sorted, offsets, count, stream);
}

void multiply(float *d, const uint32_t *a, const uint32_t *b, const uint32_t *scales, cudaStream_t stream)
{
    fp4_tile<<<1, 32, 0, stream>>>(d, a, b, scales);
}
