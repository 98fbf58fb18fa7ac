"""Runs scikit-build-core's backend in the stack's Python, which has neither it nor this package.

    python -I -B driver.py TOOLS WHEELS [SETTING=VALUE …]

Stands alone, and works in every Python from 3.11 on. Its own lines begin with a mark.
"""

import os
import sys

MARK = "sm120-build:"


def main(tools: str, wheels: str, settings: list[str]) -> int:
    sys.path.insert(0, tools)
    _say("process", str(os.getpid()))
    try:
        from scikit_build_core.build import build_wheel

        asked: dict[str, list[str] | str] = {
            name: value for name, _, value in (each.partition("=") for each in settings)
        }
        made = build_wheel(wheels, asked)
    except Exception as error:  # noqa: BLE001 - what the backend raises has no common base; the toolkit explains it
        _say("error", _words(error))
        return 1
    _say("wheel", made)
    return 0


def _words(error: BaseException) -> str:
    """One line; of a group, what it holds."""
    inside = getattr(error, "exceptions", ())
    if inside:
        return "; ".join(_words(one) for one in inside)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _say(what: str, text: str) -> None:
    print(f"{MARK}{what} {text}", flush=True)  # noqa: T201 - the toolkit reads it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
