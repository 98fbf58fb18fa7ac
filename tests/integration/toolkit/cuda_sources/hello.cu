#include <cstdio>
#include <nv/target>

__global__ void hello(int *sum)
{
    NV_IF_TARGET(NV_PROVIDES_SM_90, (atomicAdd(sum, static_cast<int>(threadIdx.x));))
}

int main()
{
    int *sum = nullptr;
    if (cudaMalloc(&sum, sizeof *sum) != cudaSuccess) {
        std::puts("no GPU");
        return 0;
    }
    hello<<<1, 32>>>(sum);
    return cudaDeviceSynchronize() != cudaSuccess;
}
