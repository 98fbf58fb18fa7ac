#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ > 900)
#error for Hopper and Ampere only
#endif

__global__ void sum(float *out, const float *values, int count)
{
    for (int i = threadIdx.x; i < count; i += blockDim.x) atomicAdd(out, values[i]);
}

int flash_sum(float *out, const float *values, int count)
{
    sum<<<1, 128>>>(out, values, count);
    return cudaGetLastError();
}
