"""Settings, resolved once where a task begins: invoke.yaml < INVOKE_* < flags."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sm120 import errors

HOME_VARIABLE = "SM120_HOME"
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Settings:
    home: Path  # the folder that relative folders stand in
    state: Path
    runs: Path


_current: Settings | None = None


def resolve(values: Mapping[str, object], env: Mapping[str, str] | None = None) -> Settings:
    """Settings from the ``sm120`` part of Invoke's configuration. UsageError on a value that is no folder name."""
    env = os.environ if env is None else env
    home = Path(env.get(HOME_VARIABLE) or CHECKOUT).expanduser().absolute()
    return Settings(
        home=home, state=_folder(home, values, "state", ".sm120"), runs=_folder(home, values, "runs", "runs")
    )


def _folder(home: Path, values: Mapping[str, object], key: str, default: str) -> Path:
    value = values.get(key) or default
    if not isinstance(value, str) or "\0" in value:
        raise errors.UsageError(
            f"the setting sm120.{key} must be a folder's name, not {value!r}",
            where="invoke.yaml or the environment",
            remedy=f"correct it in invoke.yaml or INVOKE_SM120_{key.upper()}",
        )
    return home / Path(value).expanduser()


def use(settings: Settings) -> None:
    global _current  # noqa: PLW0603 - set once where a task begins
    _current = settings


def move(home: str) -> None:
    """A task's ``--home``: moves state and runs under another folder."""
    settings = current()
    new = Path(home).expanduser().absolute()

    def under(path: Path) -> Path:
        return new / path.relative_to(settings.home) if path.is_relative_to(settings.home) else path

    use(replace(settings, home=new, state=under(settings.state), runs=under(settings.runs)))


def current() -> Settings:
    return _current or resolve({})
