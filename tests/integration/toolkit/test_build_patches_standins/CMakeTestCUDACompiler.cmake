# Stands in for CMake's module of this name.
set(CMAKE_CUDA_COMPILER_WORKS TRUE CACHE INTERNAL "")
