# Stands in for torch's configuration.
set(Torch_FOUND TRUE)
set(TORCH_LIBRARIES "")
set(CUDA_VERSION "13.0")
set(CMAKE_CUDA_ARCHITECTURES OFF)  # as torch does
