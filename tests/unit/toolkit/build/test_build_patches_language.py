"""The CMake parser: lossless, and right about what is a command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.toolkit.build import trees

from sm120.build.patches import language
from sm120.build.patches.language import NotCMake
from sm120.build.patches.source import BuildFile

PIECES = (
    *(
        "a",
        "_b9",
        "-gencode=arch=compute_90,code=sm_90",
        "$<$<COMPILE_LANGUAGE:CUDA>:${X}>",
        "$(MAKE)",
        "a=b",
        "[x",
        "[=",
        "]",
    ),
    *(
        '"q"',
        '"a\\"b"',
        '"two\nlines"',
        '"joined\\\nlines"',
        '"(#"',
        'un"quoted part"s',
        "[[br]]",
        "[=[ ]] ]=]",
        "[==[\n#(\n]==]",
    ),
    *(
        "\\;",
        "\\ ",
        "\\(",
        "\\#",
        ";",
        "é",
        "\udc80",
        "(",
        ")",
        " ",
        "\t",
        "\n",
        "\r\n",
        '# c ( "\n',
        "#[[ c\n( ]]",
        "#[=[ ]=]",
    ),
    *("if(X)\n", "endif()\n", "set(A b)\n", "else()\n"),
)


def commands(text: str) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (command.name, command.values) for command in BuildFile("x", text.encode("utf-8", "surrogateescape")).commands
    ]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_the_tokens_of_anything_that_is_cmake_are_its_text(text: str) -> None:
    try:
        found = language.tokens(text)
    except NotCMake:
        return
    assert "".join(token.text for token in found) == text
    assert [token.start for token in found] == [sum(len(t.text) for t in found[:i]) for i in range(len(found))]


@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        found = language.commands(text, language.tokens(text))
    except NotCMake:
        return
    assert all(text[c.start : c.end].endswith(")") for c in found)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_utf_8_come_back_as_they_were(data: bytes) -> None:
    try:
        file = BuildFile("x", b"set(A [[" + data.replace(b"]", b"") + b"]])")
    except NotCMake:
        assert b"\0" in data or b"[" in data
        return
    assert file.text.encode("utf-8", "surrogateescape") == b"set(A [[" + data.replace(b"]", b"") + b"]])"


@pytest.mark.parametrize("name", trees.ALL)
def test_the_build_files_of_every_shape_come_back_as_they_were(name: str) -> None:
    for path, text in trees.ALL[name]().items():
        if path.endswith((".txt", ".cmake")):
            assert "".join(token.text for token in language.tokens(text)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("set(A b)", [("set", ("A", "b"))]),
        ("SET ( A\n b )", [("set", ("A", "b"))]),
        ("set(A [[b c]] [=[d]]]=])", [("set", ("A", "b c", "d]]"))]),
        ("set(A [[\nb]])", [("set", ("A", "b"))]),
        ('set(A "b\\\nc" "d\ne")', [("set", ("A", "bc", "d\ne"))]),
        ('set(A "b\\"c" b\\ c \\t b\\;c)', [("set", ("A", 'b"c', "b c", "\t", "b\\;c"))]),
        ('set(A b"c d"e $(F) -D"x y")', [("set", ("A", 'b"c d"e', "$(F)", '-D"x y"'))]),
        ("if(A AND (B OR C))\nendif()", [("if", ("A", "AND", "(", "B", "OR", "C", ")")), ("endif", ())]),
        ("set(A # b ) c\n d)", [("set", ("A", "d"))]),
        ("#[[ set(A b)\n]]\nset(C d) #[[x]] # y", [("set", ("C", "d"))]),
        ('# set(A b)\nset(C "#")', [("set", ("C", "#"))]),
        ("#[ set(A b)\nset(C d)", [("set", ("C", "d"))]),
        ("\ufeffset(A b)\r\nset(C d)\r\n", [("set", ("A", "b")), ("set", ("C", "d"))]),
        ("set(A [b [=c ]d)", [("set", ("A", "[b", "[=c", "]d"))]),
        ('set(A "b""c")', [("set", ("A", "b", "c"))]),
        ("", []),
    ],
)
def test_commands_and_arguments(text: str, expected: list[tuple[str, tuple[str, ...]]]) -> None:
    assert commands(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("\nset(A", 2, "never closed"),
        ('\n\nset(A "b)', 3, "quoted argument"),
        ("set(A [=[ b ]] )", 1, "[=[ is never closed"),
        ("#[[ a\n", 1, "#[[ is never closed"),
        ("set(A b) set(C d)", 1, "expected a new line"),
        ("#[[ a\n]] set(C d)", 2, "expected a new line"),
        ("a b", 1, "expected ("),
        ("\n1a()", 2, "expected a command"),
        (")", 1, "expected a command"),
        ("if(A)\n if(B)\nendif()", 1, "if() is never closed"),
        ("foreach(A)\nendif()", 2, "endif() without an open if()"),
        ("else()", 1, "else() without"),
        ("set(A \\\n)", 1, "unexpected character"),
        ("set(A\0)", 1, "unexpected character"),
    ],
)
def test_what_is_no_cmake_is_told_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(NotCMake, match=message.replace("(", "\\(").replace(")", "\\)").replace("[", "\\[")) as caught:
        commands(text)
    assert caught.value.line == line


def test_a_command_knows_the_blocks_and_branches_around_it() -> None:
    text = "if(A)\na()\nelseif(B)\nforeach(x y)\nb()\nendforeach()\nelse()\nc()\nendif()\nd()\n"
    file = BuildFile("x", text.encode())
    inside = {command.name: [branch.head.name for branch in command.inside] for command in file.commands}
    assert inside["a"] == ["if"]
    assert inside["b"] == ["elseif", "foreach"]
    assert inside["c"] == ["else"]
    assert inside["d"] == inside["if"] == inside["endif"] == inside["elseif"] == []
    assert [command.line for command in file.commands] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_long_file_takes_no_longer_than_its_length_explains() -> None:
    """A backtracking scanner would not come back from these."""
    for text in ("set(A " + 'a"b ' * 20_000 + ")", "set(A " + "$(" * 20_000, '"' * 30_001, "[=" * 30_000, "(" * 50_000):
        try:
            language.commands(text, language.tokens(text))
        except NotCMake:
            continue
