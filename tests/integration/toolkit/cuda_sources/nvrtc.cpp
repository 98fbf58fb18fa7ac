#include <nvrtc.h>

extern "C" int nvrtc_version(int *major, int *minor)
{
    return static_cast<int>(nvrtcVersion(major, minor));
}
