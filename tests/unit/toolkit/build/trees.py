"""Small build files of our own, one tree for each shape that sgl-kernel's build had since September 2025."""

from pathlib import Path

from packaging.version import Version

from sm120.build.patches import Context

Tree = dict[str, str]  # path → text

MARCH = Context(cmake=Version("3.26.4"), cuda=Version("13.0"), torch=Version("2.11.0"), compile_threads=2)
NEWEST = Context(cmake=Version("4.2.3"), cuda=Version("13.0"), torch=Version("2.14.1"), compile_threads=2)

_PROLOGUE = """\
cmake_minimum_required(VERSION 3.26 FATAL_ERROR)
project(sgl-kernel LANGUAGES CXX CUDA)

include(${CMAKE_CURRENT_LIST_DIR}/cmake/utils.cmake)
include(FetchContent)

cmake_policy(SET CMP0169 OLD)
cmake_policy(SET CMP0177 NEW)

find_package(Python COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT} REQUIRED)

"""
_CUDA = """\
find_package(CUDAToolkit REQUIRED)
find_package(Torch REQUIRED)
forget_architectures(CMAKE_FLAG)

"""
_UTILS = """\
# Takes what torch adds out of the flags.
macro(forget_architectures FOUND)
    string(REGEX MATCHALL "-gencode arch=[^ ]+" FOUND "${CMAKE_CUDA_FLAGS}")
    string(REGEX REPLACE "-gencode arch=[^ ]+ *" "" CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS}")
endmacro()
"""
_THREADS = """\
set(SGL_KERNEL_COMPILE_THREADS 32 CACHE STRING "Threads of each nvcc")
if (NOT SGL_KERNEL_COMPILE_THREADS MATCHES "^[0-9]+$")
    message(FATAL_ERROR "SGL_KERNEL_COMPILE_THREADS is no number")
elseif (SGL_KERNEL_COMPILE_THREADS LESS 1)
    set(SGL_KERNEL_COMPILE_THREADS 1)
endif()
list(APPEND SGL_KERNEL_CUDA_FLAGS
    "--threads=${SGL_KERNEL_COMPILE_THREADS}"
)

"""
_GIT = """\
FetchContent_Declare(
    {name}
    GIT_REPOSITORY https://example.invalid/{name}
    GIT_TAG        57e3cfb47a2d9e0d46eb6335c3dc411498efa198
)
FetchContent_Populate({name})

"""
_ARCHIVE = """\
FetchContent_Declare(
    {name}
    URL      https://${{GITHUB_ARTIFACTORY}}/{name}.tar.gz
    URL_HASH SHA256=09237099a70f80bff1dc8bb80c843a674bb4fdcb46e43cc6993e711c5ca89bb5
)
FetchContent_Populate({name})

"""
_PYTHON = {
    "python/sgl_kernel/__init__.py": '__version__ = "0"\n',
    "python/sgl_kernel/flash_attn.py": "from sgl_kernel import flash_ops\n",
    "pyproject.toml": '[project]\nname = "sgl-kernel"\nversion = "0"\n',
}
_SOURCES = {
    "csrc/common_extension.cc": "#include <cuda/std/utility>\nTORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {}\n",
    "csrc/flash_extension.cc": (
        "TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {\n"
        '  m.def(\n      "fwd(Tensor q, "\n      "Tensor k) -> Tensor");\n'
        '  // m.def("gone(Tensor q) -> Tensor");\n'
        '  m.def("plan(int n) -> Tensor");\n}\n'
    ),
    "csrc/flashmla_extension.cc": 'TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) { m.def("mla_fwd(Tensor q) -> Tensor"); }\n',
    "csrc/spatial_extension.cc": "TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {}\n",
    "csrc/gemm.cu": "\n",
}

# Autumn 2025: one common_ops, plain architectures beside the arch-specific ones, threads written out.
_SINGLE = """\
set(CMAKE_CXX_STANDARD 17)

option(ENABLE_BELOW_SM90 "Older cards too" ON)

set(SGL_KERNEL_CUDA_FLAGS
    "-DNDEBUG"
    "-gencode=arch=compute_90,code=sm_90"
    "-std=c++17"
    "--threads=32"
)
if (ENABLE_BELOW_SM90)
    list(APPEND SGL_KERNEL_CUDA_FLAGS
        "-gencode=arch=compute_80,code=sm_80"
        "-gencode=arch=compute_89,code=sm_89"
    )
endif()
if ("${CUDA_VERSION}" VERSION_GREATER_EQUAL "12.8" OR SGL_KERNEL_ENABLE_SM100A)
    list(APPEND SGL_KERNEL_CUDA_FLAGS
        "-gencode=arch=compute_100,code=sm_100"
        "-gencode=arch=compute_100a,code=sm_100a"
        "-gencode=arch=compute_120,code=sm_120"
        "-gencode=arch=compute_120a,code=sm_120a"
    )
    if (CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
        list(APPEND SGL_KERNEL_CUDA_FLAGS
            "-gencode=arch=compute_121,code=sm_121"
            "-gencode=arch=compute_121a,code=sm_121a"
        )
    endif()
endif()

set(SOURCES "csrc/common_extension.cc" "csrc/gemm.cu")
Python_add_library(common_ops MODULE USE_SABI ${SKBUILD_SABI_VERSION} WITH_SOABI ${SOURCES})
target_compile_options(common_ops PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${SGL_KERNEL_CUDA_FLAGS}>)
target_include_directories(common_ops PRIVATE ${repo-cutlass_SOURCE_DIR}/include)

set(MSCCLPP_BUILD_TESTS OFF)
add_subdirectory(${repo-mscclpp_SOURCE_DIR} ${CMAKE_CURRENT_BINARY_DIR}/mscclpp-build)
target_link_libraries(common_ops PRIVATE ${TORCH_LIBRARIES} mscclpp_static)
install(TARGETS common_ops LIBRARY DESTINATION sgl_kernel)

"""
_FA3 = """\
if (SGL_KERNEL_ENABLE_FA3)
    set(SGL_FLASH_KERNEL_CUDA_FLAGS
        "-gencode=arch=compute_90a,code=sm_90a"
        "-std=c++{standard}"
    )
    if (ENABLE_BELOW_SM90)
        list(APPEND SGL_FLASH_KERNEL_CUDA_FLAGS
            "-gencode=arch=compute_80,code=sm_80"
            "-gencode=arch=compute_86,code=sm_86"
        )
        file(GLOB FA3_SM8X_GEN_SRCS "${{repo-flash-attention_SOURCE_DIR}}/hopper/*_sm80.cu")
    endif()
    set(FLASH_SOURCES
        "csrc/flash_extension.cc"
        "${{repo-flash-attention_SOURCE_DIR}}/hopper/flash_api.cpp"
    )

    Python_add_library(flash_ops MODULE USE_SABI ${{SKBUILD_SABI_VERSION}} WITH_SOABI ${{FLASH_SOURCES}})
    target_compile_options(flash_ops PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${{SGL_FLASH_KERNEL_CUDA_FLAGS}}>)
    target_link_libraries(flash_ops PRIVATE ${{TORCH_LIBRARIES}})
    install(TARGETS flash_ops LIBRARY DESTINATION "sgl_kernel")

    if(NOT ENABLE_BELOW_SM90)
        list(APPEND FLASH_OPS_COMPILE_DEFS FLASHATTENTION_DISABLE_SM8x)
    endif()
    target_compile_definitions(flash_ops PRIVATE ${{FLASH_OPS_COMPILE_DEFS}})
endif()

"""
_FORCED_FA3 = """\
if ("${CUDA_VERSION}" VERSION_GREATER_EQUAL "12.4")
    set(SGL_KERNEL_ENABLE_FA3 ON)
    list(APPEND SGL_KERNEL_CUDA_FLAGS
        "-gencode=arch=compute_90a,code=sm_90a"
    )
endif()

"""
_SPATIAL = """\
Python_add_library(spatial_ops MODULE USE_SABI ${SKBUILD_SABI_VERSION} WITH_SOABI "csrc/spatial_extension.cc")
target_compile_options(spatial_ops PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${SGL_KERNEL_CUDA_FLAGS}>)
target_link_libraries(spatial_ops PRIVATE ${TORCH_LIBRARIES})
install(TARGETS spatial_ops LIBRARY DESTINATION sgl_kernel)
"""
# From December 2025: the same operators twice, FlashMLA in a file of its own.
_TWIN_FLAGS = """\
set(SGL_KERNEL_CUDA_FLAGS
    "-DNDEBUG"
    "-gencode=arch=compute_90,code=sm_90"
    "-std=c++{standard}"
    # "--threads=32"
    "-Xcudafe=--diag_suppress=177"   # declared and never used
)
"""
_TWINS = """\
if (ENABLE_BELOW_SM90)
    list(APPEND SGL_KERNEL_CUDA_FLAGS
        "-gencode=arch=compute_80,code=sm_80"
        "-gencode=arch=compute_89,code=sm_89"
    )
endif()
if ("${{CUDA_VERSION}}" VERSION_GREATER_EQUAL "12.8" OR SGL_KERNEL_ENABLE_SM100A)
    list(APPEND SGL_KERNEL_CUDA_FLAGS
        "-gencode=arch=compute_{sm100},code=sm_{sm100}"
        "-gencode=arch=compute_120a,code=sm_120a"
    )
    if ("${{CUDA_VERSION}}" VERSION_GREATER_EQUAL "13.0")
        list(APPEND SGL_KERNEL_CUDA_FLAGS
            "-gencode=arch=compute_103a,code=sm_103a"
            "--compress-mode=size"
        )
        if (CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
            list(APPEND SGL_KERNEL_CUDA_FLAGS
                "-gencode=arch=compute_110a,code=sm_110a"
                "-gencode=arch=compute_121a,code=sm_121a"
            )
        endif()
    endif()
endif()

set(SOURCES "csrc/common_extension.cc" "csrc/gemm.cu" "${{repo-flashinfer_SOURCE_DIR}}/csrc/norm.cu")
set(INCLUDES ${{repo-cutlass_SOURCE_DIR}}/include)

# Fast math, for 9.0
Python_add_library(common_ops_sm90_build MODULE USE_SABI ${{SKBUILD_SABI_VERSION}} WITH_SOABI ${{SOURCES}})
target_compile_options(common_ops_sm90_build PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:${{SGL_KERNEL_CUDA_FLAGS}} -use_fast_math>
)
target_include_directories(common_ops_sm90_build PRIVATE ${{INCLUDES}})
set_target_properties(common_ops_sm90_build PROPERTIES
    OUTPUT_NAME "common_ops"
    LIBRARY_OUTPUT_DIRECTORY "${{CMAKE_CURRENT_BINARY_DIR}}/sm90"
)
# Precise math, for everything else
Python_add_library(common_ops_sm100_build MODULE USE_SABI ${{SKBUILD_SABI_VERSION}} WITH_SOABI ${{SOURCES}})
target_compile_options(common_ops_sm100_build PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:${{SGL_KERNEL_CUDA_FLAGS}}>
)
target_include_directories(common_ops_sm100_build PRIVATE ${{INCLUDES}})
set_target_properties(common_ops_sm100_build PROPERTIES
    OUTPUT_NAME "common_ops"
    LIBRARY_OUTPUT_DIRECTORY "${{CMAKE_CURRENT_BINARY_DIR}}/sm100"
)
target_link_libraries(common_ops_sm90_build PRIVATE ${{TORCH_LIBRARIES}})
target_link_libraries(common_ops_sm100_build PRIVATE ${{TORCH_LIBRARIES}})
install(TARGETS common_ops_sm90_build LIBRARY DESTINATION sgl_kernel/sm90)
install(TARGETS common_ops_sm100_build LIBRARY DESTINATION sgl_kernel/sm100)

"""
_MSCCLPP = """\
add_subdirectory(
    ${repo-mscclpp_SOURCE_DIR}
    ${CMAKE_CURRENT_BINARY_DIR}/mscclpp-build
)

"""
_INCLUDE_MLA = "include(${CMAKE_CURRENT_LIST_DIR}/cmake/flashmla.cmake)\n"
_MLA = """\
{fetch}set(FLASHMLA_CUDA_FLAGS
    "--expt-relaxed-constexpr"
)
if(${{CUDA_VERSION}} VERSION_GREATER 12.4)
    list(APPEND FLASHMLA_CUDA_FLAGS
        "-gencode=arch=compute_90a,code=sm_90a"
    )
endif()
if(${{CUDA_VERSION}} VERSION_GREATER 12.8)
    list(APPEND FLASHMLA_CUDA_FLAGS
        "-gencode=arch=compute_{sm100},code=sm_{sm100}"
    )
endif()
if(${{CUDA_VERSION}} VERSION_GREATER_EQUAL "13.0")
    file(READ "${{repo-flashmla_SOURCE_DIR}}/csrc/flashmla_utils.h" CONTENT)
    string(REPLACE
"#if defined(ONE) && (ONE == 1)
#define \\"TWO\\" 1"
"#if 1 // \\\\ ; $ENV{{HOME}}
#endif"
        CONTENT "${{CONTENT}}")
    list(APPEND FLASHMLA_CUDA_FLAGS
        "-gencode=arch=compute_103a,code=sm_103a"
    )
endif()
set(FlashMLA_SOURCES
    "csrc/flashmla_extension.cc"
    ${{repo-flashmla_SOURCE_DIR}}/csrc/python_api.cpp
)
Python_add_library(flashmla_ops MODULE USE_SABI ${{SKBUILD_SABI_VERSION}} WITH_SOABI ${{FlashMLA_SOURCES}})
target_compile_options(flashmla_ops PRIVATE {standard}$<$<COMPILE_LANGUAGE:CUDA>:${{FLASHMLA_CUDA_FLAGS}}>)
{cccl}target_include_directories(flashmla_ops PRIVATE
    ${{repo-flashmla_SOURCE_DIR}}/csrc
    ${{FLASHMLA_CCCL_INCLUDE}}
)
target_link_libraries(flashmla_ops PRIVATE ${{TORCH_LIBRARIES}})
install(TARGETS flashmla_ops LIBRARY DESTINATION "sgl_kernel")
target_compile_definitions(flashmla_ops PRIVATE)
"""
_FIND_CCCL = """\
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL "13.0")
    find_path(FLASHMLA_CCCL_INCLUDE NAMES cuda/std/utility
        HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}/cccl)
endif()
"""
# From July 2026: archives, FA3 an option, InfLLM with flags of its own, the C++ standard a setting (autumn).
_INFLLM = """\
set(INFLLM_FLASH_CUDA_FLAGS
    "-O3"
    "-std=c++${SGL_KERNEL_CXX_STANDARD}"
    "--threads=${SGL_KERNEL_COMPILE_THREADS}"
)
if (ENABLE_BELOW_SM90)
    list(APPEND INFLLM_FLASH_CUDA_FLAGS "-gencode=arch=compute_80,code=sm_80")
endif()
list(APPEND INFLLM_FLASH_CUDA_FLAGS "-gencode=arch=compute_90,code=sm_90")
if ("${CUDA_VERSION}" VERSION_GREATER_EQUAL "12.8" OR SGL_KERNEL_ENABLE_SM100A)
    list(APPEND INFLLM_FLASH_CUDA_FLAGS "-gencode=arch=compute_120a,code=sm_120a")
endif()
Python_add_library(infllm_ops MODULE WITH_SOABI "csrc/gemm.cu" "csrc/spatial_extension.cc")
target_compile_options(infllm_ops PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${INFLLM_FLASH_CUDA_FLAGS}>)
install(TARGETS infllm_ops LIBRARY DESTINATION "sgl_kernel")

"""


def _below(folder: str, main: str, mla: str | None = None) -> Tree:
    tree = {"CMakeLists.txt": main, "cmake/utils.cmake": _UTILS, **_PYTHON, **_SOURCES}
    if mla is not None:
        tree["cmake/flashmla.cmake"] = mla
    return {f"{folder}/{path}": text for path, text in tree.items()}


def _git(*names: str) -> str:
    return "".join(_GIT.format(name=name) for name in names)


def _archives(*names: str) -> str:
    return "".join(_ARCHIVE.format(name=name) for name in names)


def single() -> Tree:
    prologue = _PROLOGUE.replace("cmake_policy(SET CMP0177 NEW)\n", "")
    fetched = _git("repo-cutlass", "repo-mscclpp", "repo-flash-attention")
    return _below(
        "sgl-kernel", prologue + _CUDA + fetched + _SINGLE + _FORCED_FA3 + _FA3.format(standard=17) + _SPATIAL
    )


def twins() -> Tree:
    fetched = _git("repo-cutlass", "repo-flashinfer", "repo-mscclpp", "repo-flash-attention")
    middle = "set(CMAKE_CXX_STANDARD 17)\n" + _CUDA + fetched + 'option(ENABLE_BELOW_SM90 "Older cards too" ON)\n'
    flags = _TWIN_FLAGS.format(standard=17) + _THREADS + _FORCED_FA3
    rest = _TWINS.format(sm100="100a") + _MSCCLPP + _FA3.format(standard=17) + _SPATIAL + _INCLUDE_MLA
    mla = _MLA.format(fetch=_git("repo-flashmla"), sm100="100a", standard="", cccl="")
    return _below("sgl-kernel", _PROLOGUE + middle + flags + rest, mla)


def archives() -> Tree:
    fetched = _archives("repo-cutlass", "repo-flashinfer", "repo-flash-attention")
    middle = (
        'set(GITHUB_ARTIFACTORY "github.invalid" CACHE STRING "Where archives come from")\n'
        'set(SGL_KERNEL_CXX_STANDARD "17" CACHE STRING "C++ standard")\n'
        "set(CMAKE_CXX_STANDARD ${SGL_KERNEL_CXX_STANDARD})\n"
        + _CUDA
        + fetched
        + 'option(ENABLE_BELOW_SM90 "Older cards too" ON)\noption(SGL_KERNEL_ENABLE_FA3 "FA3" ON)\n'
    )
    standard = "${SGL_KERNEL_CXX_STANDARD}"
    flags = _TWIN_FLAGS.format(standard=standard) + _THREADS
    rest = _TWINS.format(sm100="100f") + _FA3.format(standard=standard) + _INFLLM + _SPATIAL + _INCLUDE_MLA
    own = "$<$<COMPILE_LANGUAGE:CXX>:-std=c++20> "
    mla = _MLA.format(fetch=_archives("repo-flashmla"), sm100="100f", standard=own, cccl=_FIND_CCCL)
    return _below("python/sglang/kernels/aot", _PROLOGUE + middle + flags + rest, mla)


ALL = {"single": single, "twins": twins, "archives": archives}


def main_of(tree: Tree) -> str:
    """The path of the main build file."""
    return next(path for path in tree if path.endswith("CMakeLists.txt"))


def lay_out(root: Path, tree: Tree) -> Path:
    for path, text in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode())
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Everything below ``root``."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
