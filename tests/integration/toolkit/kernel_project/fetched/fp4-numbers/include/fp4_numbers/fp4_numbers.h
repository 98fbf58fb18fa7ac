#pragma once

namespace fp4_numbers {

// The value of a code of E2M1: sign, two bits of exponent, one of mantissa.
constexpr float value(int code)
{
    constexpr float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

}  // namespace fp4_numbers
