"""What uv says when it fails, in words. Pure: text in, error out; texts are those of uv 0.9 to 0.13."""

import itertools
import re
from contextlib import suppress
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sm120 import errors, files
from sm120.process import Completed

_SHOWN = 500  # letters of uv's own explanation
_AGAIN = "then run the same command again"
_CERTIFICATE = re.compile(r"invalid peer certificate|UnknownIssuer|CertificateRequired|certificate verify failed")
_NETWORK = re.compile(
    r"error sending request|dns error|tcp connect error|[Cc]onnection (?:refused|reset|closed)|operation timed out"
    r"|Could not connect|Network is unreachable|error decoding response body|end of file before message|timed out",
)
_URL = re.compile(r"(?:Failed to fetch:?|for url) [`(]?(https?://[^\s`)]+|file://[^\s`)]+)")
_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3}) ([^)]*)\)")
_REQUIREMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[^\]]*\])?(?:[<>=!~]=?=?[^\s,]+(?:,\s?[<>=!~]=?=?[^\s,]+)*)?"
_DEPENDS = re.compile(rf"(?:all versions of )?({_REQUIREMENT}) depends? on ({_REQUIREMENT})")
_REQUIRE = re.compile(rf"you require ({_REQUIREMENT})")
_CLAUSES = re.compile(r"(?:,|\.|\band\b)\s+|(?:\b[Aa]nd )?\b[Bb]ecause\s+")
_MISSING = (
    re.compile(rf"there (?:is no version|are no versions) of ({_REQUIREMENT})"),
    re.compile(rf"({_REQUIREMENT}) was not found in the (?:package registry|provided package locations|cache)"),
    re.compile(rf"({_REQUIREMENT}) (?:has|have) no (?:wheels|usable wheels)"),
    re.compile(rf"only (?:the following versions of )?({_REQUIREMENT})(?: is| are)? available"),
)
_HINT = re.compile(r"^hint: (.+)$", re.MULTILINE)


class Unsatisfiable(errors.PreflightError):
    """The requirements contradict each other, or something in them cannot be had."""

    def __init__(self, message: str, *, where: str, remedy: str, text: str) -> None:
        super().__init__(message, where=where, remedy=remedy)
        self.text = text  # uv's explanation in one line


class NoSuchVersion(Unsatisfiable):
    """No configured index has a wanted version for this Python and this machine."""

    def __init__(self, message: str, *, wanted: str, where: str, remedy: str, text: str) -> None:
        super().__init__(message, where=where, remedy=remedy, text=text)
        self.wanted = wanted  # as in torch==2.15.0
        self.package = canonicalize_name(re.split(r"[<>=!~\[]", wanted, maxsplit=1)[0])


@dataclass(frozen=True)
class Wish:
    who: str  # a package, or "the stack"
    requirement: Requirement


def explain(text: str, done: Completed, log: str) -> errors.PreflightError:
    """The error for a uv that failed, from all that it wrote."""
    if done.timed_out:
        return errors.PreflightError(
            "uv did not end in time", where=log, remedy=f"see the log for what it waited for, {_AGAIN}"
        )
    if re.search(r"No space left on device|Disk quota exceeded|os error (?:28|122)\b", text):
        return errors.PreflightError(
            "no space left on the disk while the stack was resolved",
            where=log,
            remedy=f"free some space, or {files.MOVE_REMEDY}; uv also writes to TMPDIR",
        )
    if "No solution found" in text:
        return _unsatisfiable(text, log)
    url = found[1] if (found := _URL.search(text)) else "the package index"
    if _CERTIFICATE.search(text):
        return errors.PreflightError(
            f"the certificate of {url} is not trusted",
            where=log,
            remedy=f"name your company's certificates: pip config set global.cert /path/to/bundle.pem, {_AGAIN}",
        )
    if status := _STATUS.search(text):
        return errors.PreflightError(
            f"{url} answers {status[1]} {status[2]}".strip(),
            where=log,
            remedy="where it asks for a password, put it into ~/.netrc; else look for another index: pip config list",
        )
    if _NETWORK.search(text):
        return errors.PreflightError(
            f"{url} could not be reached, or broke off",
            where=log,
            remedy="connect to the network, or name an index or a folder of wheels that can be reached (pip config set"
            f" global.index-url URL, or PIP_NO_INDEX=1 PIP_FIND_LINKS=/folder), {_AGAIN}",
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    problem = next((line for line in lines if line.startswith("error")), lines[-1] if lines else "no output")
    cause = next((line for line in reversed(lines) if line.startswith("cause")), "")
    return errors.PreflightError(
        f"uv fails with exit code {done.returncode}: {problem.removeprefix('error: ')} {cause}".strip(),
        where=log,
        remedy=f"see the log named above, mend what it says, {_AGAIN}",
    )


def _unsatisfiable(text: str, log: str) -> Unsatisfiable:
    flat = explanation(text)
    pair = contradiction(flat)
    if pair:
        first, second = pair
        return Unsatisfiable(
            f"{first.who} asks for {first.requirement}, but {second.who} for {second.requirement}",
            where=log,
            remedy="change one of the pins in a copy of the stack file, or say in its [overrides] which of them wins",
            text=flat,
        )
    for pattern in _MISSING:
        if found := pattern.search(flat):
            hint = f" ({hints[0].strip()})" if (hints := _HINT.findall(text)) and "wheels" in hints[0].lower() else ""
            return NoSuchVersion(
                f"no configured package index has {found[1]} for this Python on this machine{hint}",
                wanted=found[1],
                where=log,
                remedy="add an index or a folder that has it (pip config set global.extra-index-url URL, or"
                " PIP_FIND_LINKS=/folder), change the pin in a copy of the stack file, or use another Python"
                " (SM120_PYTHON)",
                text=flat,
            )
    short = flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN]} …"
    return Unsatisfiable(
        f"the stack's packages do not fit together: {short}",
        where=log,
        remedy="change a pin in a copy of the stack file; the log has the whole explanation",
        text=flat,
    )


def explanation(text: str) -> str:
    """The reasons that uv gives, in one line, without its conclusions."""
    _, _, rest = text.partition("cause:")
    body = re.split(r"^hint:", rest or text, maxsplit=1, flags=re.MULTILINE)[0]
    flat = " ".join(body.split())
    return re.sub(r",? we can conclude that your requirements are unsatisfiable", "", flat)


def wishes(flat: str) -> list[Wish]:
    """Who asks for what, from uv's explanation: "a depends on x==1 and x<1 and you require y"."""
    found: list[Wish] = []
    who = ""
    for clause in _CLAUSES.split(flat):
        text = clause.strip().rstrip(".,")
        if depends := _DEPENDS.fullmatch(text):
            who, text = depends[1], depends[2]
        elif require := _REQUIRE.fullmatch(text):
            who, text = "the stack", require[1]
        elif not re.fullmatch(_REQUIREMENT, text):
            who = ""
        if not who or not text:
            continue
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            is_said = any(wish.who == who and wish.requirement.name == requirement.name for wish in found)
            # A second limit on the same package is nobody's dependency.
            found.append(Wish("a constraint" if is_said and who != "the stack" else who, requirement))
    return found


def contradiction(flat: str) -> tuple[Wish, Wish] | None:
    """Two wishes for one package of which one is an exact version that the other excludes."""
    for first, second in itertools.permutations(wishes(flat), 2):
        if canonicalize_name(first.requirement.name) != canonicalize_name(second.requirement.name):
            continue
        exact = re.fullmatch(r"==([^,*]+)", str(first.requirement.specifier))
        if exact and not second.requirement.specifier.contains(exact[1], prereleases=True):
            return first, second
    return None
