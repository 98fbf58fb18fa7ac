# What a CUDA build of torch adds to the flags, and CMake's own choice, go: the flags below name the architectures.
macro(forget_architectures FOUND)
    string(REGEX MATCHALL "-gencode arch=[^ ]+" FOUND "${CMAKE_CUDA_FLAGS}")
    string(REGEX REPLACE "-gencode arch=[^ ]+ *" "" CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS}")
    set(CMAKE_CUDA_ARCHITECTURES OFF)
endmacro()
