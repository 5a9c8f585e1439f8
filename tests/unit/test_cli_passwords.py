"""Passwords come from the first line of a file."""

from pathlib import Path

import pytest

from rag_service.cli.passwords import read_password
from rag_service.errors import ConfigurationError


def test_the_first_line_without_its_end_is_the_password(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b" open sesame \r\nnot this\n")
    assert read_password(file) == " open sesame "


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_a_file_without_a_password_is_refused_with_the_option(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="--password-file"):
        read_password(file)


def test_without_a_file_there_is_no_password() -> None:
    assert read_password(None) is None
