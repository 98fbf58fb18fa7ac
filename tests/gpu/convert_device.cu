// Converts files of numbers on the GPU with the conversions of cuda_fp4.h and cuda_fp8.h.
//   convert_device (CONVERSION INPUT OUTPUT)...
// All files are raw arrays. Rounding is to nearest even, overflow saturates. `quantize:K:GLOBAL_SCALE` takes float32 rows
// of K elements and writes the packed codes of all rows, then the block scales of all rows.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace {

constexpr int kThreads = 256;
constexpr int kBlock = 16;

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "convert_device: %s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}

[[noreturn]] void fail(const char* what, const std::string& subject) {
    std::fprintf(stderr, "convert_device: %s: %s\n", what, subject.c_str());
    std::exit(1);
}

std::vector<char> read_file(const std::string& path) {
    std::ifstream source(path, std::ios::binary | std::ios::ate);
    if (!source) fail("cannot read", path);
    std::vector<char> bytes(static_cast<std::size_t>(source.tellg()));
    source.seekg(0);
    source.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!source) fail("cannot read", path);
    return bytes;
}

void write_file(const std::string& path, const std::vector<char>& bytes) {
    std::ofstream sink(path, std::ios::binary);
    sink.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    sink.flush();
    if (!sink) fail("cannot write", path);
}

// Runs launch(input, output) on device copies of the files' bytes.
template <class Launch>
void on_device(const std::string& input, const std::string& output, std::size_t output_bytes, Launch launch) {
    const std::vector<char> from = read_file(input);
    std::vector<char> to(output_bytes);
    void *device_from = nullptr, *device_to = nullptr;
    check(cudaMalloc(&device_from, from.size()), "cudaMalloc");
    check(cudaMalloc(&device_to, to.size()), "cudaMalloc");
    check(cudaMemcpy(device_from, from.data(), from.size(), cudaMemcpyHostToDevice), "copy to the device");
    launch(device_from, device_to);
    check(cudaGetLastError(), "launch");
    check(cudaMemcpy(to.data(), device_to, to.size(), cudaMemcpyDeviceToHost), "copy from the device");
    check(cudaFree(device_from), "cudaFree");
    check(cudaFree(device_to), "cudaFree");
    write_file(output, to);
}

unsigned blocks_for(std::size_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

// ---- element by element ----

struct FloatToFp4 {
    using In = float;
    using Out = std::uint8_t;
    static __device__ Out convert(In x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
};
struct Float2ToFp4x2 {
    using In = float2;
    using Out = std::uint8_t;
    static __device__ Out convert(In x) { return __nv_cvt_float2_to_fp4x2(x, __NV_E2M1, cudaRoundNearest); }
};
struct HalfToFp4 {
    using In = __half_raw;
    using Out = std::uint8_t;
    static __device__ Out convert(In x) { return __nv_cvt_halfraw_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
};
struct Bf16ToFp4 {
    using In = __nv_bfloat16_raw;
    using Out = std::uint8_t;
    static __device__ Out convert(In x) { return __nv_cvt_bfloat16raw_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
};
struct FloatToFp8 {
    using In = float;
    using Out = std::uint8_t;
    static __device__ Out convert(In x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
};
struct HalfToFp8 {
    using In = __half_raw;
    using Out = std::uint8_t;
    static __device__ Out convert(In x) { return __nv_cvt_halfraw_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
};
struct Bf16ToFp8 {
    using In = __nv_bfloat16_raw;
    using Out = std::uint8_t;
    static __device__ Out convert(In x) { return __nv_cvt_bfloat16raw_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
};
struct Fp4ToFloat {
    using In = std::uint8_t;
    using Out = float;
    static __device__ Out convert(In x) { return __half2float(__half(__nv_cvt_fp4_to_halfraw(x, __NV_E2M1))); }
};
struct Fp8ToFloat {
    using In = std::uint8_t;
    using Out = float;
    static __device__ Out convert(In x) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3))); }
};

template <class Conversion>
__global__ void map_kernel(const typename Conversion::In* from, typename Conversion::Out* to, std::size_t count) {
    const std::size_t i = static_cast<std::size_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count) to[i] = Conversion::convert(from[i]);
}

template <class Conversion>
void map(const std::string& input, const std::string& output) {
    using In = typename Conversion::In;
    using Out = typename Conversion::Out;
    const std::size_t count = read_file(input).size() / sizeof(In);
    on_device(input, output, count * sizeof(Out), [count](const void* from, void* to) {
        map_kernel<Conversion><<<blocks_for(count), kThreads>>>(static_cast<const In*>(from), static_cast<Out*>(to), count);
    });
}

// ---- the standard recipe, one thread a block of 16 ----

__global__ void quantize_kernel(const float* x, std::uint8_t* packed, std::uint8_t* scales, float global_scale,
                                std::size_t count) {
    const std::size_t block = static_cast<std::size_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (block >= count) return;
    x += block * kBlock;
    packed += block * (kBlock / 2);

    float amax = 0.0f;
    for (int i = 0; i < kBlock; ++i) {
        const float magnitude = fabsf(x[i]);
        if (magnitude > amax || isnan(magnitude)) amax = magnitude;  // a NaN stays: nothing compares greater
    }
    const float wanted = __fmul_rn(global_scale, __fdiv_rn(amax, 6.0f));
    const __nv_fp8_storage_t byte = __nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3);
    const float scale = Fp8ToFloat::convert(byte);
    const float multiplier = scale == 0.0f ? 0.0f : __fdiv_rn(global_scale, scale);
    scales[block] = byte;
    for (int i = 0; i < kBlock; i += 2) {
        packed[i / 2] = Float2ToFp4x2::convert(make_float2(__fmul_rn(x[i], multiplier), __fmul_rn(x[i + 1], multiplier)));
    }
}

void quantize(const std::string& parameters, const std::string& input, const std::string& output) {
    char* end = nullptr;
    const long k = std::strtol(parameters.c_str(), &end, 10);
    if (*end != ':' || k <= 0 || k % kBlock) fail("quantize:K:GLOBAL_SCALE expected, K a multiple of 16", parameters);
    const float global_scale = std::strtof(end + 1, &end);
    const std::size_t elements = read_file(input).size() / sizeof(float);
    if (*end || elements % k) fail("bad global scale, or the file does not hold whole rows", parameters);
    const std::size_t blocks = elements / kBlock;
    on_device(input, output, elements / 2 + blocks, [=](const void* from, void* to) {
        auto* packed = static_cast<std::uint8_t*>(to);
        quantize_kernel<<<blocks_for(blocks), kThreads>>>(static_cast<const float*>(from), packed, packed + elements / 2,
                                                          global_scale, blocks);
    });
}

void run(const std::string& conversion, const std::string& input, const std::string& output) {
    const std::string recipe = "quantize:";
    if (conversion == "float_to_fp4") map<FloatToFp4>(input, output);
    else if (conversion == "float2_to_fp4x2") map<Float2ToFp4x2>(input, output);
    else if (conversion == "half_to_fp4") map<HalfToFp4>(input, output);
    else if (conversion == "bf16_to_fp4") map<Bf16ToFp4>(input, output);
    else if (conversion == "float_to_fp8") map<FloatToFp8>(input, output);
    else if (conversion == "half_to_fp8") map<HalfToFp8>(input, output);
    else if (conversion == "bf16_to_fp8") map<Bf16ToFp8>(input, output);
    else if (conversion == "fp4_to_float") map<Fp4ToFloat>(input, output);
    else if (conversion == "fp8_to_float") map<Fp8ToFloat>(input, output);
    else if (conversion.rfind(recipe, 0) == 0) quantize(conversion.substr(recipe.size()), input, output);
    else fail("unknown conversion", conversion);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4 || argc % 3 != 1) fail("usage", "convert_device (CONVERSION INPUT OUTPUT)...");
    for (int i = 1; i < argc; i += 3) run(argv[i], argv[i + 1], argv[i + 2]);
    return 0;
}
