# Stands in for CMake's module of this name: a toolkit that has only header files.
set(CUDAToolkit_FOUND TRUE)
set(CUDAToolkit_INCLUDE_DIRS "${SM120_TOOLKIT}/include")
