// The operators, bound to torch; the only file here that needs torch's headers.
#include <Python.h>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <fp4_numbers/fp4_numbers.h>
#include <scale_steps.h>

#include "sgl_kernel_ops.h"

namespace {

using at::Tensor;

const uint32_t *words(const Tensor &tensor, int64_t count)
{
    TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == at::kByte, "expected contiguous bytes");
    TORCH_CHECK(tensor.numel() == 4 * count, "expected ", 4 * count, " bytes, not ", tensor.numel());
    return static_cast<const uint32_t *>(tensor.const_data_ptr());
}

Tensor fp4_tile_mm(const Tensor &a, const Tensor &b, const Tensor &scales_a, const Tensor &scales_b)
{
    Tensor d = at::empty({16, 8}, a.options().dtype(at::kFloat));
    const int error = sgl_kernel_small::fp4_tile_mm(
        d.mutable_data_ptr<float>(), words(a, 16 * 8), words(b, 8 * 8), words(scales_a, 16), words(scales_b, 8));
    TORCH_CHECK(error == 0, "CUDA error ", error);
    return d;
}

void scale_values(Tensor &values, double factor)
{
    TORCH_CHECK(values.is_contiguous() && values.scalar_type() == at::kFloat, "expected contiguous floats");
    const int error =
        sgl_kernel_small::scale_values(values.mutable_data_ptr<float>(), values.numel(), static_cast<float>(factor));
    TORCH_CHECK(error == 0, "CUDA error ", error);
}

// Of each code of E2M1 its value, times the largest step: needs no GPU.
Tensor fp4_values()
{
    Tensor values = at::empty({16}, at::kFloat);
    for (int code = 0; code < 16; code++)
        values.mutable_data_ptr<float>()[code] = fp4_numbers::value(code) * scale_steps::largest;
    sgl_kernel_small::count_launch();
    return values;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel, m)
{
    m.def("fp4_tile_mm(Tensor a, Tensor b, Tensor scales_a, Tensor scales_b) -> Tensor");
    m.impl("fp4_tile_mm", c10::kCUDA, &fp4_tile_mm);

    m.def("scale_values(Tensor! values, float factor) -> ()");
    m.impl("scale_values", c10::kCUDA, &scale_values);

    m.def("fp4_values() -> Tensor", &fp4_values);
    m.def("launches() -> int", &sgl_kernel_small::launches);
}

PyMODINIT_FUNC PyInit_common_ops()
{
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, "common_ops", nullptr, 0, nullptr};
    return PyModule_Create(&module);
}
