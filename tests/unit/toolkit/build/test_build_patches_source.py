"""Edits by span: what they do not name stays, byte for byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.toolkit.build import trees

from sm120.build.patches.source import BuildFile, edited

TEXT = 'set(A\n\t"b"  # why\n\t"c" "d"\n)\n\nlist(APPEND A "e")\nset(B c)  # end'


def changed(text: str, old: str, *, what: str) -> str:
    """``text`` without the argument or the command ``old``."""
    file = BuildFile("x", text.encode("utf-8", "surrogateescape"))
    if what == "command":
        command = next(c for c in file.commands if file.text[c.start : c.end] == old)
        return edited(text, [file.remove(command.start, command.end)])
    argument = next(a for c in file.commands for a in c.arguments if a.token.text == old)
    return edited(text, [file.remove_argument(argument)])


@pytest.mark.parametrize(
    ("old", "what", "expected"),
    [
        ('"b"', "argument", 'set(A\n\t"c" "d"\n)\n\nlist(APPEND A "e")\nset(B c)  # end'),
        ('"c"', "argument", 'set(A\n\t"b"  # why\n\t"d"\n)\n\nlist(APPEND A "e")\nset(B c)  # end'),
        ('"d"', "argument", 'set(A\n\t"b"  # why\n\t"c"\n)\n\nlist(APPEND A "e")\nset(B c)  # end'),
        ('"e"', "argument", 'set(A\n\t"b"  # why\n\t"c" "d"\n)\n\nlist(APPEND A)\nset(B c)  # end'),
        ('list(APPEND A "e")', "command", 'set(A\n\t"b"  # why\n\t"c" "d"\n)\n\nset(B c)  # end'),
        ("set(B c)", "command", 'set(A\n\t"b"  # why\n\t"c" "d"\n)\n\nlist(APPEND A "e")\n'),
    ],
)
def test_what_is_removed_takes_its_line_only_when_it_is_alone_there(old: str, what: str, expected: str) -> None:
    assert changed(TEXT, old, what=what) == expected
    windows = changed(TEXT.replace("\n", "\r\n"), old, what=what)
    assert windows == expected.replace("\n", "\r\n")


def test_a_line_is_put_behind_the_comment_of_its_command_and_before_the_line_break() -> None:
    file = BuildFile("x", b"  set(A b)  # why ( \r\nset(C d)")
    first, last = file.commands
    assert edited(file.text, [file.insert_after(first, ["x()"])]) == "  set(A b)  # why ( \r\n  x()\r\nset(C d)"
    assert edited(file.text, [file.insert_after(last, ["x()"])]) == "  set(A b)  # why ( \r\nset(C d)\r\nx()"


def test_a_bracket_comment_over_several_lines_is_not_cut() -> None:
    file = BuildFile("x", b"set(A b) #[[ c\nd ]]\nset(E f)\n")
    assert edited(file.text, [file.insert_after(file.commands[0], ["x()"])]) == "set(A b) #[[ c\nd ]]\nx()\nset(E f)\n"


def test_two_edits_of_one_place_are_a_fault_of_the_rule() -> None:
    file = BuildFile("x", b"set(A b)\n")
    with pytest.raises(ValueError, match="two edits"):
        edited(file.text, [file.replace(0, 5, "a"), file.replace(4, 6, "b")])


@given(st.data())
def test_edits_leave_everything_else(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([t for make in trees.ALL.values() for p, t in make().items() if "CMake" in p]))
    file = BuildFile("x", text.encode())
    arguments = [a for c in file.commands for a in c.arguments]
    some = data.draw(st.lists(st.sampled_from(arguments), unique_by=lambda a: a.start, max_size=5))
    made = edited(text, [file.replace(a.start, a.end, "\0") for a in some])
    for argument in sorted(some, key=lambda a: a.start):
        made = made.replace("\0", argument.token.text, 1)
    assert made == text
