#include <cuda.h>

extern "C" int start_driver()
{
    return static_cast<int>(cuInit(0));
}
