#pragma once

namespace marks {

constexpr int none = 0;

}  // namespace marks
