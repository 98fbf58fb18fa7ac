"""The correctness matrix: operations x backends x cases -> isolated workers -> verdicts -> grid -> gate."""
