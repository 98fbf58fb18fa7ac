"""Run by a stack's Python: builds FlashInfer's FP4 quantiser for SM120 by FlashInfer's own JIT."""

import os
import sys
from pathlib import Path

from flashinfer.jit import env
from flashinfer.jit.fp4_quantization import gen_fp4_quantization_sm120_module

spec = gen_fp4_quantization_sm120_module()
spec.build(verbose=bool(os.environ.get("VERBOSE")))
(library,) = Path(env.FLASHINFER_JIT_DIR).rglob("fp4_quantization_120.so")
sys.stdout.write(f"library {library}\n")
