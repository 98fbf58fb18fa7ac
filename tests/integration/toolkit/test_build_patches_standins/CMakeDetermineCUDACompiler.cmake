# Stands in for CMake's module of this name: a CUDA language without a compiler, enough to configure and generate.
set(CMAKE_CUDA_COMPILER "${CMAKE_COMMAND}")
set(CMAKE_CUDA_COMPILER_ENV_VAR "CUDACXX")
file(WRITE "${CMAKE_PLATFORM_INFO_DIR}/CMakeCUDACompiler.cmake"
    "set(CMAKE_CUDA_COMPILER \"${CMAKE_COMMAND}\")\n"
    "set(CMAKE_CUDA_COMPILER_ENV_VAR \"CUDACXX\")\n"
    "set(CMAKE_CUDA_COMPILER_LOADED 1)\n"
    "set(CMAKE_CUDA_COMPILER_VERSION \"13.0.48\")\n"
    "set(CMAKE_CUDA_SOURCE_FILE_EXTENSIONS cu)\n"
    "set(CMAKE_CUDA_LINKER_PREFERENCE 15)\n"
    "set(CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES \"${SM120_TOOLKIT}/include\")\n"
)
