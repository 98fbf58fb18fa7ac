// For the host compiler alone, which does not know where CUDA 13 has these headers.
#include <cuda/atomic>
#include <cuda/std/utility>

int main()
{
    cuda::std::pair<int, int> pair{20, 22};
    cuda::atomic<int> sum{pair.first};
    sum.fetch_add(pair.second);
    return sum.load() == 42 ? 0 : 1;
}
