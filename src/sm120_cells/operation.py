"""One operator of a kernel package against the same in float64, on a card of compute capability 12.x.

Runs in the stack's Python, where this toolkit is not: it imports nothing but the package and torch.
"""

import importlib
import json
import math
import sys
from collections.abc import Callable

import torch

ROWS, COLUMNS = 7, 2048
# A rounding to bfloat16 loses half a step, 2**-8, at most; a kernel may also round the function before the product.
_ROUNDING = 2.0**-7 * (1 + 2.0**-8)

# Name → the same of the first half of the columns, and what its fast approximation may lose beside the rounding, as a
# share of the product of both halves. Present in every version since 2025; the first that there is is taken.
OPERATORS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "silu_and_mul": (torch.nn.functional.silu, 2.0**-16),
    "gelu_and_mul": (torch.nn.functional.gelu, 2.0**-16),
    "gelu_tanh_and_mul": (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), 2.0**-9),
}


def compare(module: object, device: str) -> dict[str, object]:
    """The operator that was tried (None: the package has none of these) and how far it was off, in what is allowed."""
    name = next((name for name in OPERATORS if hasattr(module, name)), None)
    if name is None:
        return {"op": None}
    function, lost = OPERATORS[name]
    made = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(120), dtype=torch.float64)
    given = made.to(torch.bfloat16)
    left, right = given.to(torch.float64).chunk(2, dim=-1)
    wanted = function(left) * right
    found = getattr(module, name)(given.to(device)).to("cpu", torch.float64)
    if found.shape != wanted.shape:
        return {"op": name, "off": None, "why": f"a result of shape {tuple(found.shape)}"}
    allowed = (_ROUNDING * wanted.abs() + lost * (left * right).abs()).clamp_min(1e-30)
    off = float(((found - wanted).abs() / allowed).max())
    return {"op": name, "off": off} if math.isfinite(off) else {"op": name, "off": None, "why": "it is no number"}


def main(name: str) -> None:
    module = importlib.import_module(name)
    found: dict[str, object] = {"file": str(module.__file__), "card": None, "capability": None}
    if torch.version.cuda is not None and torch.cuda.is_available():
        cards = [torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())]
        number = next((number for number, capability in enumerate(cards) if capability[0] == 12), 0)
        found |= {"card": torch.cuda.get_device_name(number), "capability": cards[number]}
        if cards[number][0] == 12:
            torch.cuda.set_device(number)
            found |= compare(module, f"cuda:{number}")
    sys.stdout.write("\ntried " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
