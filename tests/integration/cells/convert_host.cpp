// Converts a file of numbers with the conversions of cuda_fp4.h and cuda_fp8.h as a host compiler builds them.
//   convert_host CONVERSION INPUT OUTPUT
// Both files are raw arrays. Rounding is to nearest even, overflow saturates.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

namespace {

template <class In, class Convert>
bool convert_file(const std::string& input, const std::string& output, Convert convert) {
    using Out = std::invoke_result_t<Convert, In>;
    std::ifstream source(input, std::ios::binary | std::ios::ate);
    if (!source) return false;
    const auto bytes = static_cast<std::size_t>(source.tellg());
    std::vector<In> from(bytes / sizeof(In));
    source.seekg(0);
    source.read(reinterpret_cast<char*>(from.data()), static_cast<std::streamsize>(from.size() * sizeof(In)));
    std::vector<Out> to(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = convert(from[i]);
    std::ofstream sink(output, std::ios::binary);
    sink.write(reinterpret_cast<const char*>(to.data()), static_cast<std::streamsize>(to.size() * sizeof(Out)));
    sink.flush();
    return bytes % sizeof(In) == 0 && source.good() && sink.good();
}

std::uint8_t float_to_fp4(float x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
std::uint8_t float2_to_fp4x2(float2 x) { return __nv_cvt_float2_to_fp4x2(x, __NV_E2M1, cudaRoundNearest); }
std::uint8_t double_to_fp4(double x) { return __nv_cvt_double_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
std::uint8_t half_to_fp4(__half_raw x) { return __nv_cvt_halfraw_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
std::uint8_t bf16_to_fp4(__nv_bfloat16_raw x) { return __nv_cvt_bfloat16raw_to_fp4(x, __NV_E2M1, cudaRoundNearest); }

std::uint8_t float_to_fp8(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
std::uint8_t double_to_fp8(double x) { return __nv_cvt_double_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
std::uint8_t half_to_fp8(__half_raw x) { return __nv_cvt_halfraw_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
std::uint8_t bf16_to_fp8(__nv_bfloat16_raw x) { return __nv_cvt_bfloat16raw_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

float fp4_to_float(std::uint8_t x) { return __half2float(__half(__nv_cvt_fp4_to_halfraw(x, __NV_E2M1))); }
float fp8_to_float(std::uint8_t x) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3))); }

template <class In, class Convert>
auto over_files(Convert convert) {
    return [convert](const std::string& input, const std::string& output) {
        return convert_file<In>(input, output, convert);
    };
}

const std::map<std::string, std::function<bool(const std::string&, const std::string&)>> conversions = {
    {"float_to_fp4", over_files<float>(float_to_fp4)},
    {"float2_to_fp4x2", over_files<float2>(float2_to_fp4x2)},
    {"double_to_fp4", over_files<double>(double_to_fp4)},
    {"half_to_fp4", over_files<__half_raw>(half_to_fp4)},
    {"bf16_to_fp4", over_files<__nv_bfloat16_raw>(bf16_to_fp4)},
    {"float_to_fp8", over_files<float>(float_to_fp8)},
    {"double_to_fp8", over_files<double>(double_to_fp8)},
    {"half_to_fp8", over_files<__half_raw>(half_to_fp8)},
    {"bf16_to_fp8", over_files<__nv_bfloat16_raw>(bf16_to_fp8)},
    {"fp4_to_float", over_files<std::uint8_t>(fp4_to_float)},
    {"fp8_to_float", over_files<std::uint8_t>(fp8_to_float)},
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4 || conversions.count(argv[1]) == 0) {
        std::fprintf(stderr, "usage: convert_host CONVERSION INPUT OUTPUT; conversions:\n");
        for (const auto& [name, convert] : conversions) std::fprintf(stderr, "  %s\n", name.c_str());
        return 2;
    }
    if (!conversions.at(argv[1])(argv[2], argv[3])) {
        std::fprintf(stderr, "convert_host: cannot convert %s to %s\n", argv[2], argv[3]);
        return 1;
    }
    return 0;
}
