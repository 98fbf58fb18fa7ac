// For the host compiler, which does not know where CUDA 13 has these headers.
#include <cuda/atomic>
#include <tally/tally.h>

#include "sgl_kernel_ops.h"

namespace {

cuda::atomic<int64_t, cuda::thread_scope_system> count{0};

}  // namespace

int64_t sgl_kernel_small::launches()
{
    return count.load() + tally::seen();
}

void sgl_kernel_small::count_launch()
{
    count.fetch_add(1);
}
