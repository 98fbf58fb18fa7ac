#pragma once

#include <cuda/atomic>

namespace tally {

extern cuda::atomic<int, cuda::thread_scope_system> total;

int seen();

}  // namespace tally
