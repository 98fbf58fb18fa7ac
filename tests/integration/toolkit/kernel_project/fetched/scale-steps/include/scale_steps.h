#pragma once

namespace scale_steps {

constexpr float largest = 448.0f;  // that UE4M3 holds

}  // namespace scale_steps
