#include <tally/tally.h>

#include <marks.h>

namespace tally {

cuda::atomic<int, cuda::thread_scope_system> total{marks::none};

int seen()
{
    return total.load();
}

}  // namespace tally
